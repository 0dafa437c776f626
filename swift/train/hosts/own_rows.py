"""The part of every batch that this host reads."""

from collections.abc import Callable
from dataclasses import dataclass

from swift.data.loader import Loader
from swift.data.windows import Batch
from swift.pipeline.reconfigure.compiled_steps import Steps


@dataclass(frozen=True)
class OwnSequences:
    """Batches of which only those sequences are read that this host's devices compute on; the others are padding.

    Attributes:
        loader: batches of a split.
        steps: returns the present step functions.
    """

    loader: Loader
    steps: Callable[[], Steps]

    def batch(self, step: int) -> Batch:
        """Loads this host's part of the batch of an iteration, see ``Loader.batch``."""
        return self.loader.batch(step, self.steps().read_here)

    @property
    def num_batches_per_epoch(self) -> int:
        """Number of batches in which every window occurs, rounded up."""
        return self.loader.num_batches_per_epoch
