"""Trials of a user's own rules before a run: placement policies and routers.

Errors found here are mistakes of the rule's author, so messages name the line in the author's file.
"""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from swift.errors import SettingError, error_line

_TRACED = (
    "needs a number where JAX has none yet, since it is traced before a run begins: "
    "use jax.numpy, jnp.where and jax.lax instead of numpy, float() and Python's if and for"
)


@dataclass(frozen=True)
class Trial:
    """Checks of one rule, and the errors that name the setting that selected it.

    Attributes:
        subject: the rule.
        setting: name of the setting.
    """

    subject: Any
    setting: str

    def refuse(self, reason: str) -> NoReturn:
        """Raises SettingError about the rule."""
        raise SettingError(self.setting, self.subject, reason)

    def attempt(self, method: str, call: Callable[[], Any]) -> Any:
        """Returns the result of a call; turns an exception into a SettingError about the rule's method."""
        try:
            return call()
        except SettingError:
            raise
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise SettingError(self.setting, self.subject, f"{method}{self._line(error)} {_TRACED}") from error
        except Exception as error:
            reason = f"{method}{self._line(error)} raises {error_line(error)}"
            raise SettingError(self.setting, self.subject, reason) from error

    def _line(self, error: Exception) -> str:
        """Finds the last line of the rule's own file in an error's traceback."""
        try:
            own_file = inspect.getfile(type(self.subject))
        except (TypeError, OSError):
            return ""
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own_file]
        return f" ({own_file.rpartition('/')[2]}:{lines[-1].lineno})" if lines else ""


def described(tree: Any) -> str:
    """Describes a result for an error: shapes and dtypes of abstract arrays, or the type of something else."""
    if isinstance(tree, jax.ShapeDtypeStruct):
        return f"{tree.dtype}{list(tree.shape)}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(described, tree))})"
    return f"a {type(tree).__name__}" if tree is not None else "nothing"
