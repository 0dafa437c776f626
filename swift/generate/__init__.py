"""Generation: an engine that batches many requests to one model and shares the KV cache of common prefixes.

``engine`` answers requests. ``request`` defines requests and answers, and samples the next tokens. ``texts`` schedules
sequences and manages the pages of the KV cache, with a radix tree of shared prefixes. ``paged_model`` plans which
tokens a call computes, and runs the forward pass over the pages. ``programs`` builds prompts from given and generated
parts, with constrained decoding. ``continuation`` continues texts with the model of a run.
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
