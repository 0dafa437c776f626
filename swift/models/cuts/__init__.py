"""Cuts of blocks into stages, the chunks of pipelines that are cut differently, and the rows of both in arrays."""

from swift.models.cuts.block_rows import BlockRows
from swift.models.cuts.chunks import Chunks
from swift.models.cuts.cut import Cut, make_cut

__all__ = ["BlockRows", "Chunks", "Cut", "make_cut"]
