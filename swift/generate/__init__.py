"""Generation: many requests to one model, which share the keys and values of common beginnings.

``engine`` answers requests (``request``) by calls of ``paged_model``, the forward pass over keys and values in pages.
``drafts`` hands the pages out, ``radix_tree`` knows which texts share them, ``passages`` plans the tokens of a call,
and ``sampling`` chooses the next ones. ``programs`` writes texts of given and generated parts, which ``grammar``
constrains.
"""

from swift.generate.engine import Computed, TextEngine, TextEngineConfig
from swift.generate.gen import Gen
from swift.generate.grammar import Until
from swift.generate.paged_model import check_devices, check_expert_ranks
from swift.generate.pieces import Shown, decoded
from swift.generate.programs import Prompt, Writer
from swift.generate.radix_tree import Node, RadixTree
from swift.generate.request import Answer, Constraint, Reason, Request
from swift.generate.sampling import GREEDY, Sampling

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
