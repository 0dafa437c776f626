"""Type checks of arrays, for jaxtyping's import hook: shapes and dtypes of annotated arguments and results.

Other annotations are not checked: settings report wrong types themselves, and tests pass them such.
"""

from collections.abc import Callable
from inspect import isclass
from typing import Any, get_args

import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray, jaxtyped


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the annotated arrays of a function at each call; NumPy arrays pass where JAX's are expected."""
    hints = {name: _or_numpy(hint) for name, hint in function.__annotations__.items() if _has_arrays(hint)}
    if not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def checked_where_arrays_are(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Does what ``jaxtyping.jaxtyped`` does, to what has annotated arrays alone: other calls stay quick."""
    check = jaxtyped(typechecker=typechecker)

    def decorate(defined: Any) -> Any:
        function = defined.__init__ if isclass(defined) else defined
        hints = getattr(function, "__annotations__", {}).values()
        return check(defined) if any(isinstance(hint, str) or _has_arrays(hint) for hint in hints) else defined

    return decorate


def _has_arrays(hint: Any) -> bool:
    return _is_array(hint) or any(map(_has_arrays, get_args(hint)))


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _or_numpy(hint: Any) -> Any:
    return hint | hint.dtype[np.ndarray, hint.dim_str] if _is_array(hint) else hint
