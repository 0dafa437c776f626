"""Digests of operators: of their settings, their code and what it refers to, and of the pipeline before a cache."""

import dataclasses
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from swift.data.pipeline.operators import name_of
from swift.data.pipeline.pipeline import Pipeline
from swift.data.pipeline.plan import InputPlan
from swift.data.tokenizer import TokenizerFile
from swift.program import this_program

_VERSION = 2


class NoDigest(ValueError):
    """A value of which it cannot be said whether another is the same; the message says which."""


def survey_digest(plan: InputPlan) -> str:
    """Returns a digest of all that decides what a survey of a plan finds and keeps.

    Raises:
        NoDigest: the source, or an operator, cannot be told from another.
    """
    source = plan.pipeline.source.digest()
    if source is None:
        raise NoDigest(f"the source {plan.pipeline.source!r} cannot be told from another")
    parts = [
        _VERSION,
        sys.version,
        np.__version__,
        source,
        plan.num_packed > 0,
        plan.pipeline.most_skipped,
        plan.cache.num_elements if plan.cache is not None else None,
        *(value_digest(element) for element in plan.elements(0)[: plan.num_surveyed]),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def pipeline_facts(pipeline: Pipeline) -> dict[str, str]:
    """Returns what two machines have to have in common that make samples of a pipeline, each by its name.

    Raises:
        NoDigest: the source, or an operator, cannot be told from another.
    """
    source = pipeline.source.digest()
    if source is None:
        raise NoDigest(f"the source {pipeline.source!r} cannot be told from another")
    elements = [(name_of(element), value_digest(element)) for element in pipeline.levels[0].elements]
    return {
        "version of Swift, Python, JAX or NumPy": f"{this_program()} {sys.version}",
        "data": source,
        "operators": hashlib.sha256(repr(elements).encode()).hexdigest(),
    }


def value_digest(value: Any) -> str:
    """Returns a digest of a setting or a function, with the functions and constants of its module that it refers to.

    Code of other modules counts by name only: a change there needs another cache directory, or an empty one.

    Raises:
        NoDigest: it is, or refers to, an object that cannot be told from another.
    """
    return hashlib.sha256(repr(_said(value, {})).encode()).hexdigest()


def _said(value: Any, seen: dict[int, int]) -> Any:
    """Describes a value by plain ones; one that refers to itself is replaced by a number."""
    if value is None or isinstance(value, str | bytes | int | float | complex | type(...)):
        return type(value).__name__, value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    said = _container(value, seen)
    if said is None:
        said = _code(value, seen)
    if said is None:
        raise NoDigest(f"{value!r} ({type(value).__name__}) cannot be told from another")
    return said


def _container(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, TokenizerFile):
        return "tokenizer", value.digest(), value.end_of_document
    if isinstance(value, tuple | list):
        return type(value).__name__, [_said(one, seen) for one in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(_said(one, seen)) for one in value)
    if isinstance(value, dict):
        return "dict", [(_said(key, seen), _said(one, seen)) for key, one in value.items()]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: _said(getattr(value, one.name), seen) for one in dataclasses.fields(value)}
        return "dataclass", _said(type(value), seen), fields
    return None


def _code(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, functools.partial):
        return "partial", _said(value.func, seen), _said(value.args, seen), _said(dict(value.keywords), seen)
    if isinstance(value, types.MethodType):
        return "method", _said(value.__func__, seen), _said(value.__self__, seen)
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, types.ModuleType):
        return "module", value.__name__, getattr(value, "__version__", None)
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return "builtin", getattr(value, "__module__", None), value.__name__
    if isinstance(value, type):
        try:
            return "class", value.__module__, value.__qualname__, inspect.getsource(value)
        except (OSError, TypeError):  # of C, or typed in
            return ("class", value.__module__, value.__qualname__) if value.__module__ != "__main__" else None
    if hasattr(value, "pattern") and hasattr(value, "flags"):  # a compiled regular expression
        return "pattern", value.pattern, int(value.flags)
    return None


def _function(function: types.FunctionType, seen: dict[int, int]) -> Any:
    closure = [_said(cell.cell_contents, seen) for cell in function.__closure__ or ()]
    defaults = _said((function.__defaults__ or (), dict(function.__kwdefaults__ or {})), seen)
    is_own = function.__module__.partition(".")[0] not in sys.stdlib_module_names
    referred = _referred(function, seen) if is_own else []
    name, code = f"{function.__module__}.{function.__qualname__}", _bytecode(function.__code__)
    return "function", name, code, closure, defaults, referred


def _referred(function: types.FunctionType, seen: dict[int, int]) -> Sequence[Any]:
    """Describes the globals that a function names; of another module's functions only the name."""
    found = list[Any]()
    for name in sorted(_names(function.__code__) & set(function.__globals__)):
        value = function.__globals__[name]
        if getattr(value, "__module__", function.__module__) not in (function.__module__, None):
            found.append((name, getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(type(value)))))
        else:
            found.append((name, _said(value, seen)))
    return found


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def _bytecode(code: types.CodeType) -> Any:
    constants = list(map(_constant, code.co_consts))
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants


def _constant(value: Any) -> Any:
    """Describes a constant of a function's code, in the same way in each process: a set has an order of its own."""
    if isinstance(value, types.CodeType):
        return _bytecode(value)
    if isinstance(value, tuple):
        return "tuple", list(map(_constant, value))
    return ("frozenset", sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
