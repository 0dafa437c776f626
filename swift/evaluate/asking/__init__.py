"""Questions put to a generation engine.

``likelihood`` makes the tokens of texts that follow others, and ``asking`` puts the questions of a task file, many at
once.
"""

from swift.evaluate.asking.asking import ask, prepare_questions
from swift.evaluate.asking.likelihood import continuation_of, seen

__all__ = ["ask", "continuation_of", "prepare_questions", "seen"]
