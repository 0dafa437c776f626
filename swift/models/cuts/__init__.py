"""Cuts of blocks into stages, the chunks of pipelines that are cut differently, and the stacks of both in arrays."""

from swift.models.cuts.chunks import Chunks
from swift.models.cuts.cut import Cut, make_cut
from swift.models.cuts.stacks import BlockStacks

__all__ = ["BlockStacks", "Chunks", "Cut", "make_cut"]
