"""Generation: many requests to one model, which share the keys and values of common beginnings.

``engine`` answers requests (``request``) by calls of ``paged_model``, the forward pass over keys and values in pages.
``drafts`` hands the pages out, ``radix_tree`` knows which texts share them, ``passages`` plans the tokens of a call,
and ``sampling`` chooses the next ones. ``programs`` writes texts of given and generated parts, which ``grammar``
constrains.
"""

from typing import TYPE_CHECKING

from swift.lazy_names import lazy_names

if TYPE_CHECKING:
    from swift.generate.engine import Computed, TextEngine, TextEngineConfig
    from swift.generate.gen import Gen
    from swift.generate.grammar import Until
    from swift.generate.paged_model import check_devices, check_expert_ranks
    from swift.generate.pieces import Shown, decoded
    from swift.generate.programs import Prompt, Writer
    from swift.generate.radix_tree import Node, RadixTree
    from swift.generate.request import Answer, Constraint, Reason, Request
    from swift.generate.sampling import GREEDY, Sampling

_MODULES = {
    "swift.generate.engine": ["Computed", "TextEngine", "TextEngineConfig"],
    "swift.generate.gen": ["Gen"],
    "swift.generate.grammar": ["Until"],
    "swift.generate.paged_model": ["check_devices", "check_expert_ranks"],
    "swift.generate.pieces": ["Shown", "decoded"],
    "swift.generate.programs": ["Prompt", "Writer"],
    "swift.generate.radix_tree": ["Node", "RadixTree"],
    "swift.generate.request": ["Answer", "Constraint", "Reason", "Request"],
    "swift.generate.sampling": ["GREEDY", "Sampling"],
}
__all__ = [
    "GREEDY",
    "Answer",
    "Computed",
    "Constraint",
    "Gen",
    "Node",
    "Prompt",
    "RadixTree",
    "Reason",
    "Request",
    "Sampling",
    "Shown",
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
