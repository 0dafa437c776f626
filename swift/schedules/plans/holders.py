"""The workers that hold the chunks of a model: as a run's cut says, or as another one for the survivors of failures."""

from collections.abc import Collection
from typing import NamedTuple

from swift.schedules.plans.normalize import Move
from swift.topology import Worker


class BlockHolders(NamedTuple):
    """The workers that hold each chunk; False if they hold what they do in a run whose pipelines are cut alike.

    Attributes:
        stage_of_chunk: stage that holds each chunk, by pipeline, none where nobody has a place in a pipeline; empty
            where a chunk is a stage.
        moves: workers that have another's place.
    """

    stage_of_chunk: tuple[tuple[int, ...], ...] = ()
    moves: tuple[Move, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stage_of_chunk)

    def place(self, worker: Worker) -> Worker:
        """Returns the place of a worker: the pipeline and stage whose chunks it holds.

        >>> holders = BlockHolders(((0, 1), (0, 1)), (Move(worker=(1, 0), role=(0, 1)),))
        >>> holders.place((1, 0)), holders.place((1, 1))
        ((0, 1), (1, 1))
        """
        return next((place for mover, place in self.moves if mover == worker), worker)

    def lost_chunks(self, there: Collection[Worker]) -> tuple[int, ...]:
        """Lists the chunks that no worker among these holds; none where a chunk is a stage.

        >>> BlockHolders(((0, 0, 1), (0, 1, 1))).lost_chunks([(0, 1), (1, 0)])
        (1,)
        """
        places = {self.place(worker) for worker in there}
        held = [(d, stages) for d, stages in enumerate(self.stage_of_chunk) if stages]
        chunks = range(len(held[0][1])) if held else ()
        return tuple(chunk for chunk in chunks if places.isdisjoint((d, stages[chunk]) for d, stages in held))

    @property
    def cuts(self) -> list[list[int]]:
        """Number of chunks of each stage, by pipeline.

        >>> BlockHolders(((0, 0, 1), (0, 2, 2), ())).cuts
        [[2, 1, 0], [1, 0, 2], [0, 0, 0]]
        """
        num_stages = 1 + max((stage for stages in self.stage_of_chunk for stage in stages), default=-1)
        return [[stages.count(stage) for stage in range(num_stages)] for stages in self.stage_of_chunk]

    @property
    def places(self) -> dict[str, str]:
        """Names of the workers that have another's place, and of their places."""
        return {"{}:{}".format(*worker): "{}:{}".format(*place) for worker, place in self.moves}

    @property
    def text(self) -> str:
        """A phrase that says who holds how many layers, where chunks are layers.

        >>> BlockHolders(((0, 0, 1), (0, 2, 2)), (Move((1, 1), (0, 1)),)).text
        'stages of 2, 1, 0; 1, 0, 2 layers, 1:1 in the place of 0:1'
        """
        cuts = "; ".join(", ".join(map(str, sizes)) for sizes in self.cuts)
        moved = "".join(f", {worker} in the place of {place}" for worker, place in self.places.items())
        return f"stages of {cuts} layers{moved}"


OWN_CUT = BlockHolders()
"""Every worker in its own place, with what the cut of the run says."""
