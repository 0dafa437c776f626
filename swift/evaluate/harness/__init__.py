"""The engine as a model of lm-eval (EleutherAI's lm-evaluation-harness); needs the extra ``eval``."""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.evaluate.harness.engine_lm import EngineLM

_MODULES = {
    "swift.evaluate.harness.engine_lm": ["EngineLM"],
}
__all__ = ["EngineLM"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
