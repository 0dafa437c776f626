"""Makes the objects of a configuration: finds the settings of each, and makes those that settings refer to.

A setting applies to every object of its class, in its scope, wherever the object comes from: a reference, the default
of another setting, or a preset. The path of an object, as in ``optimizer.clip_norm``, names one object alone.
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
from swift.typed import checked, fitting, written

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
        root: name of the class of which an object is made; paths begin there.
        bindings: settings of the file, and overrides of classes.
        paths: overrides of single objects, by the path from the root: ("optimizer", "clip_norm").
        names: classes and functions that may be named.
        own: Swift's own among them, whose settings are checked against their annotations.
        file: name of the file, for errors.
        used: bindings that were used, by setting.
        objects: objects that were made or changed.
        open: classes of the objects that are being made, and macros, with their scopes.
    """

    root: str
    bindings: Bindings
    paths: Mapping[tuple[str, ...], Binding]
    names: Mapping[str, Callable]
    own: Mapping[str, Callable]
    file: str
    used: dict[str, Binding] = field(default_factory=dict)
    objects: list[_Object] = field(default_factory=list)
    open: tuple[tuple[str, str], ...] = ()

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
        """Checks all names, and tells overrides of single objects from those of classes and macros.

        Args:
            bindings: settings of the file.
            overrides: settings that replace those of the file.
            root, names, own, file: see the attributes.
        """
        paths = {}
        for override in overrides:
            first, *rest = override.setting.split(".")
            is_macro = not rest and first in bindings.by_setting
            if first in _parameters(names[root]) and not is_macro:
                paths[(first, *rest)] = override
            else:
                bindings.add(override)
        maker = cls(root, Bindings(), paths, names, own, file)
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
            known = [*self.names, *(_parameters(self.names[self.root]) if binding.file is None else ())]
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

    def make(self, reference: Reference, path: tuple[str, ...] = (), scope: str = "") -> Any:
        """Makes what a reference stands for.

        Args:
            reference: class or function.
            path: path of the object from the root.
            scope: scope of the object that it is a setting of.
        """
        scope, kind, name = reference.scope or scope, self.names[reference.name], self._shortest(reference.name)
        settings = self._settings(_Object(path, name, kind), _defaults(kind), scope)
        if not reference.is_call:
            return partial(kind, **settings) if settings else kind
        made = self._called(name, settings)
        return made if isinstance(kind, type) else self._changed(made, scope, path)

    def _changed(self, value: Any, scope: str, path: tuple[str, ...]) -> Any:
        """Returns an object with the settings that the configuration has for its class."""
        kind: type = type(value)
        if not is_dataclass(kind) or self.names.get(kind.__name__) is not kind:
            return value
        current = {parameter: getattr(value, parameter) for parameter in _parameters(kind)}
        settings = self._settings(_Object(path, kind.__name__, kind), current, scope)
        return self._called(kind.__name__, current | settings) if settings else value

    def _settings(self, made: _Object, current: Mapping[str, Any], scope: str) -> dict[str, Any]:
        """Returns the settings that the configuration has for an object, or for an object in a ``current`` setting."""
        self.objects.append(made)
        settings = {}
        for parameter in _parameters(made.kind):
            path, setting = (*made.path, parameter), f"{made.name}.{parameter}"
            bindings = self.bindings.find(scope, setting)
            bindings += [self.paths[path]] if path in self.paths else []
            if bindings:
                self.used |= {binding.setting: binding for binding in bindings} | {setting: bindings[-1]}
                with self._within(made.name, scope):
                    settings[parameter] = self._value(bindings[-1].value, bindings[-1], scope, path)
            else:
                before = current.get(parameter)
                after = self._changed(before, scope, path)
                settings |= {} if after is before else {parameter: after}
        return settings

    def _value(self, value: Any, binding: Binding, scope: str, path: tuple[str, ...]) -> Any:
        """Replaces the references and macros in a binding's value."""

        def items(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
            return ((key, self._value(item, binding, scope, (*path, str(key)))) for key, item in pairs)

        if isinstance(value, Reference):
            if (self._shortest(value.name), value.scope or scope) in self.open:
                raise binding.error("contains itself")
            return self.make(value, path, scope)
        if isinstance(value, Macro):
            macro = self.bindings.by_setting.get(value.name)
            if macro is None or macro.name:
                raise binding.error(f"{value} is set nowhere")
            if ("%", value.name) in self.open:
                raise binding.error("contains itself")
            self.used[value.name] = macro
            with self._within("%", value.name):
                return self._value(macro.value, macro, scope, path)
        if isinstance(value, tuple | list):
            return type(value)(item for _, item in items(enumerate(value)))
        return dict(items(value.items())) if isinstance(value, Mapping) else value

    @contextmanager
    def _within(self, name: str, scope: str) -> Iterator[None]:
        outer, self.open = self.open, (*self.open, (name, scope))
        yield
        self.open = outer

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

        An unused setting is an error if it is an override, a macro, in a scope that no value names, or of a class that
        the experiment has. Unused settings of an alternative may stay: an included file may set ``FlexMoE.interval``,
        and the including file chooses another policy.
        """
        for path, override in self.paths.items():
            if override.setting not in self.used:
                raise override.error(self._dead_end(path))
        bindings = self.bindings.by_setting
        values = [value for binding in bindings.values() for value in references(binding.value)]
        scopes = [f"{value.scope}/" for value in values if isinstance(value, Reference)]
        names = {name for _, name, _ in self.objects}
        for setting, binding in bindings.items():
            if setting in self.used:
                continue
            if not binding.name:
                everything = [f"{name}.{known}" for name, kind in self.own.items() for known in _parameters(kind)]
                raise binding.error(f"is used nowhere; {suggest(binding.owner, everything, _NAMED)}")
            has_scope = not binding.scope or any(scope.startswith(f"{binding.scope}/") for scope in scopes)
            if binding.file is None or binding.owner in names or not has_scope:
                owner = setting.rpartition(".")[0]
                raise binding.error(f"would change nothing: this experiment has no @{owner}()")

    def _dead_end(self, path: tuple[str, ...]) -> str:
        """Says why a path leads to no setting."""
        outer = [made for made in self.objects if made.path == path[: len(made.path)]]
        nearest = max(outer, key=lambda made: len(made.path))
        known, inner = _parameters(nearest.kind), path[: len(nearest.path) + 1]
        if inner[-1] in known:
            return f"would change nothing: {'.'.join(inner)} has no settings of its own"
        return f"{nearest.name} has no such setting; {suggest(inner[-1], known)}"

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
