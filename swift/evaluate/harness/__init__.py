"""The engine as a model of lm-eval (EleutherAI's lm-evaluation-harness); needs the extra ``eval``."""

from swift.evaluate.harness.engine_lm import EngineLM

__all__ = ["EngineLM"]
