"""Makes a configuration's objects: finds the settings of each, and makes the objects that settings refer to.

A setting applies to every object of its class, in its scope, wherever the object comes from: a reference, the default
of another setting, or a preset. The path of an object, as in ``optimizer.clip_norm``, names one object alone. Classes
and functions that a file names are called: a file is as much a program as the modules that it imports.
"""

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

from swift.config.bindings import Binding, Bindings, Macro, Reference, references
from swift.errors import SettingError, error_line, suggest
from swift.typed import NOT_SET, checked, fitting, written

_NAMED = "a setting is named like Experiment.num_steps"
_INDEX = re.compile(r"\[.*")


class _Object(NamedTuple):
    """An object that a configuration makes or changes."""

    path: tuple[str, ...]
    name: str
    kind: Callable


@dataclass
class Maker:
    """Makes the objects of a configuration.

    Attributes:
        root: name of Swift's class of which an object is made; paths begin there.
        bindings: settings of the file, and overrides of classes.
        paths: overrides of single objects, by the path from the root: ("optimizer", "clip_norm").
        names: classes and functions that may be named.
        own: Swift's own among them, whose settings are checked against their annotations.
        file: name of the file, for errors.
        used: bindings that have set a value, by setting.
        objects: objects that were made or changed.
        unfinished: classes of the objects that are being made, and macros, with their scopes.
    """

    root: str
    bindings: Bindings
    paths: Mapping[tuple[str, ...], Binding]
    names: Mapping[str, Callable]
    own: Mapping[str, Callable]
    file: str
    used: dict[str, Binding] = field(default_factory=dict)
    objects: list[_Object] = field(default_factory=list)
    unfinished: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        root: str,
        bindings: Bindings,
        overrides: Iterable[Binding],
        names: Mapping[str, Callable],
        own: Mapping[str, Callable],
        file: str,
    ) -> Self:
        """Creates a maker, and separates overrides for single objects from overrides for classes and macros.

        Args:
            bindings: settings of the file.
            overrides: settings that replace those of the file.
            root, names, own, file: see the attributes.

        Raises:
            SettingError: a class, function or setting is unknown.
        """
        paths = {}
        for override in overrides:
            first, *rest = override.setting.removeprefix(f"{root}.").split(".")
            is_macro = not rest and first in bindings.by_setting
            is_class = override.owner in names and bool(override.name)
            if first in _parameters(own[root]) and not is_macro and not is_class:
                paths[(first, *rest)] = override
            else:
                bindings.add(override)
        maker = cls(root, Bindings(macros=bindings.macros), paths, names, own, file)
        for binding in bindings.by_setting.values():
            maker.bindings.add(maker.known(binding))
        for override in paths.values():
            maker.check_value(override)
        return maker

    def known(self, binding: Binding) -> Binding:
        """Returns a binding with its class by the shortest name; raises SettingError for an unknown name."""
        self.check_value(binding)
        if not binding.name:
            return binding
        kind = self.names.get(binding.owner)
        if kind is None:
            known = [*self.names, *(_parameters(self.own[self.root]) if binding.file is None else ())]
            raise binding.error(f"there is no {binding.owner}; {suggest(binding.owner, known)}")
        if binding.name not in _parameters(kind):
            near = suggest(binding.name, _parameters(kind))
            raise binding.error(f"{binding.owner} has no such setting; {near}")
        return replace(binding, owner=self._shortest(binding.owner))

    def check_value(self, binding: Binding) -> None:
        """Raises SettingError if a value names an unknown class or function."""
        for value in references(binding.value):
            if isinstance(value, Reference) and value.name not in self.names:
                kind = self.own.get(binding.owner)
                hint = typing.get_type_hints(kind).get(binding.name) if kind else None
                known = [*fitting(hint, self.own), *(n for n in self.names if n.rpartition(".")[2] not in self.own)]
                raise binding.error(f"there is no {value.name}; {suggest(value.name, known)}")

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Adds the file and line of the setting to errors that are raised in the block."""
        try:
            yield
        except SettingError as error:
            binding = self.used.get(_INDEX.sub("", error.setting))
            allowed = error.allowed if binding is None else binding.located(error.allowed)
            raise SettingError(error.setting, written(error.value), allowed) from error

    def make(
        self, reference: Reference, path: tuple[str, ...] = (), scope: str = "", binding: Binding | None = None
    ) -> Any:
        """Makes the object that a reference stands for.

        Args:
            reference: class or function.
            path: path of the object from the root.
            scope: scope of the object that it is a setting of.
            binding: setting whose value has the reference; None for the root.
        """
        scope, kind, name = reference.scope or scope, self.names[reference.name], self._shortest(reference.name)
        settings = self._settings(_Object(path, name, kind), _defaults(kind), scope)
        if not reference.is_call:
            return partial(kind, **settings) if settings else kind
        try:
            made = self._called(name, settings)
        except SettingError as error:
            is_elsewhere = error.setting != "CONFIG" and error.value != NOT_SET
            if binding is None or is_elsewhere:
                raise
            raise SettingError(error.setting, error.value, binding.located(error.allowed)) from error
        return made if isinstance(kind, type) else self._changed(made, scope, path, preset=binding)

    def _changed(self, value: Any, scope: str, path: tuple[str, ...], preset: Binding | None = None) -> Any:
        """Returns an object with the settings that the configuration has for its class.

        Args:
            value: any value; only dataclasses whose names may be used have settings.
            scope: scope of the object.
            path: path of the object from the root.
            preset: binding that chose a function which made the object. Settings that stand before it in a file belong
                to an alternative, such as the model of an included file, and do not change the preset.
        """
        kind: type = type(value)
        if not is_dataclass(kind) or self.names.get(kind.__name__) is not kind:
            return value
        current = {setting.name: getattr(value, setting.name) for setting in fields(kind) if setting.init}
        settings = self._settings(_Object(path, kind.__name__, kind), current, scope, preset)
        return self._called(kind.__name__, current | settings) if settings else value

    def _settings(
        self, made: _Object, current: Mapping[str, Any], scope: str, preset: Binding | None = None
    ) -> dict[str, Any]:
        """Returns the settings that the configuration has for an object, or for an object in a ``current`` setting."""
        self.objects.append(made)
        settings = {}
        for parameter in _parameters(made.kind):
            path, setting = (*made.path, parameter), f"{made.name}.{parameter}"
            # A path names one object, and so is more specific than any scope.
            bindings = [b for b in self.bindings.find(scope, setting) if preset is None or self._follows(b, preset)]
            bindings += [self.paths[path]] if path in self.paths else []
            if bindings:
                self.used |= {bindings[-1].setting: bindings[-1], setting: bindings[-1]}
                with self._within(made.name, scope):
                    settings[parameter] = self._value(bindings[-1].value, bindings[-1], scope, path)
            else:
                before = current.get(parameter)
                after = self._changed(before, scope, path, preset)
                settings |= {} if after is before else {parameter: after}
        return settings

    def _follows(self, binding: Binding, other: Binding) -> bool:
        """Whether a binding stands after another one in the files, or is an override."""
        order = list(self.bindings.by_setting)
        return binding.file is None or (
            other.setting in order and order.index(binding.setting) > order.index(other.setting)
        )

    def _value(self, value: Any, binding: Binding, scope: str, path: tuple[str, ...]) -> Any:
        """Replaces the references and macros in a binding's value."""

        def items(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
            return ((key, self._value(item, binding, scope, (*path, str(key)))) for key, item in pairs)

        if isinstance(value, Reference):
            is_open = (self._shortest(value.name), value.scope or scope) in self.unfinished
            if is_open and binding not in self.paths.values():  # a path ends, but a setting of a class has no end
                raise binding.error("contains itself")
            return self.make(value, path, scope, binding)
        if isinstance(value, Macro):
            macro = self.bindings.by_setting.get(value.name)
            if macro is None or macro.name:
                raise binding.error(f"{value} is set nowhere")
            if ("%", value.name) in self.unfinished:
                raise binding.error("contains itself")
            self.used[value.name] = macro
            with self._within("%", value.name):
                return self._value(macro.value, macro, scope, path)
        if isinstance(value, tuple | list):
            return type(value)(item for _, item in items(enumerate(value)))
        return dict(items(value.items())) if isinstance(value, Mapping) else value

    @contextmanager
    def _within(self, name: str, scope: str) -> Iterator[None]:
        outer, self.unfinished = self.unfinished, (*self.unfinished, (name, scope))
        try:
            yield
        finally:
            self.unfinished = outer

    def _called(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Calls a class or function."""
        kind = self.names[name]
        try:
            return (checked(kind, self.own) if kind is self.own.get(name) else kind)(**settings)
        except SettingError:
            raise
        except Exception as error:  # a user's own class may raise anything
            raise SettingError("CONFIG", self.file, f"making @{name}() raises {error_line(error)}") from error

    def check_used(self) -> None:
        """Refuses settings that would be ignored silently.

        These are overrides that set nothing, macros that no setting uses, and settings in a scope that no value names.
        Other settings of a file may stay unused: an included file may set ``FlexMoE.interval``, and the including file
        chooses another policy.
        """
        for path, override in self.paths.items():
            if override.setting not in self.used:
                raise override.error(self._dead_end(path))
        bindings = self.bindings.by_setting
        values = [value for binding in bindings.values() for value in references(binding.value)]
        scopes = [f"{value.scope}/" for value in values if isinstance(value, Reference)]
        for setting, binding in bindings.items():
            if self.used.get(setting) is binding:
                continue
            if not binding.name and binding.owner not in self.bindings.macros:
                everything = [f"{name}.{known}" for name, kind in self.own.items() for known in _parameters(kind)]
                raise binding.error(f"is used nowhere; {suggest(binding.owner, everything, _NAMED)}")
            winner = self.used.get(f"{binding.owner}.{binding.name}")
            if binding.file is None and binding.name and winner is not None:
                raise binding.error(f"would change nothing: {winner.setting} is set, which is more specific")
            has_scope = not binding.scope or any(scope.startswith(f"{binding.scope}/") for scope in scopes)
            if binding.name and (binding.file is None or not has_scope):
                owner = setting.rpartition(".")[0]
                raise binding.error(f"would change nothing: this experiment has no @{owner}()")

    def _dead_end(self, path: tuple[str, ...]) -> str:
        """Says why a path leads to no setting."""
        outer = [made for made in self.objects if made.path == path[: len(made.path)]]
        depth = max(len(made.path) for made in outer)
        nearest = [made for made in outer if len(made.path) == depth]  # two for a preset: its function and its class
        known = [name for made in nearest for name in _parameters(made.kind)]
        inner = path[: depth + 1]
        if inner[-1] in known:
            return f"would change nothing: {'.'.join(inner)} has no settings of its own"
        return f"{nearest[-1].name} has no such setting; {suggest(inner[-1], known)}"

    def _shortest(self, name: str) -> str:
        """Returns a class's or function's name without its module, unless there is another with that name."""
        short = name.rpartition(".")[2]
        return short if self.names.get(short) is self.names[name] else name


def _parameters(kind: Callable) -> Sequence[str]:
    """Returns the names of a class's or function's settings."""
    try:
        return tuple(inspect.signature(kind).parameters)
    except ValueError:  # some builtins have no signature
        return ()


def _defaults(kind: Callable) -> dict[str, Any]:
    """Returns the defaults of a class's settings."""
    if not is_dataclass(kind):
        return {}
    return {
        setting.name: setting.default if setting.default_factory is MISSING else setting.default_factory()
        for setting in fields(kind)
    }
