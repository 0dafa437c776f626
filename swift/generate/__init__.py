"""Generation: many requests to one model, which share the keys and values of common beginnings.

``engine`` answers requests (``request``, which also chooses the next tokens). ``texts`` hands out pages and knows which
texts share them, and ``paged_model`` plans the tokens of a call and runs the forward pass over keys and values in
pages. ``programs`` writes texts of given and generated parts, some of them constrained, and ``continuation`` continues
texts by the model of a run.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.generate.engine import Computed, TextEngine, TextEngineConfig
    from swift.generate.paged_model import check_devices, check_expert_ranks
    from swift.generate.programs import Gen, Prompt, StreamedText, Until, Writer, decoded
    from swift.generate.request import GREEDY, Answer, Constraint, Reason, Request, Sampling

_MODULES = {
    "swift.generate.engine": ["Computed", "TextEngine", "TextEngineConfig"],
    "swift.generate.paged_model": ["check_devices", "check_expert_ranks"],
    "swift.generate.programs": ["Gen", "Prompt", "StreamedText", "Until", "Writer", "decoded"],
    "swift.generate.request": ["Answer", "Constraint", "GREEDY", "Reason", "Request", "Sampling"],
}
__all__ = [
    "GREEDY",
    "Answer",
    "Computed",
    "Constraint",
    "Gen",
    "Prompt",
    "Reason",
    "Request",
    "Sampling",
    "StreamedText",
    "TextEngine",
    "TextEngineConfig",
    "Until",
    "Writer",
    "check_devices",
    "check_expert_ranks",
    "decoded",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
