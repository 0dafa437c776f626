"""Cuts of a model on the command line: ``--blocks 61 --cut 16,15,15,15``, ``--microbatches 17,17,17,13``."""

from collections.abc import Sequence
from dataclasses import dataclass

from swift.errors import SettingError, check_count, check_number
from swift.schedules.chunks import Chunk, common_chunks, cut_by_costs
from swift.schedules.problem import Costs
from swift.topology import Topology, Worker


@dataclass(frozen=True)
class BlockOptions:
    """The options that decide which blocks the stages hold.

    Attributes:
        num_blocks: ``--blocks``; None: one chunk for each stage, all alike.
        cuts: ``--cut``, as written.
        embedding: ``--embedding``, time of the embedding's gradient, in blocks.
        head: ``--head``, time of the head, in blocks.
    """

    num_blocks: int | None
    cuts: Sequence[str] | None
    embedding: float
    head: float

    def chunks(
        self, topology: Topology, failed: frozenset[Worker], costs: Costs, shape: tuple[int, ...]
    ) -> tuple[tuple[Chunk, ...], tuple[tuple[int, ...], ...]]:
        """Returns ``Problem.chunks`` and ``Problem.stage_of_chunk``, both empty without ``--blocks``.

        Args:
            topology: pipelines and stages.
            failed: failed workers.
            costs: costs of a stage of average size.
            shape: stage of each run of blocks, in the order of the model.

        Raises:
            SettingError: there are more runs than blocks, a run without a block, or a cut does not add up.
        """
        if self.num_blocks is None:
            for option, is_set in (("--cut", self.cuts), ("--embedding", self.embedding), ("--head", self.head)):
                if is_set:
                    raise SettingError(option, is_set, "needs --blocks, the number of blocks of the model")
            return (), ()
        for option, number in (("--embedding", self.embedding), ("--head", self.head)):
            check_number(option, number, least=0)
        sizes, runs = common_chunks(self._cuts(self.num_blocks, topology, failed, shape))
        holders = tuple(tuple(shape[run] for run in of_pipeline) for of_pipeline in runs)
        return self._sized(sizes, self.num_blocks, topology, costs), holders

    def blocks(self, topology: Topology, costs: Costs) -> tuple[Chunk, ...]:
        """Returns the costs of each block; without ``--blocks`` every stage is one."""
        if self.num_blocks is None:
            return (Chunk(),) * topology.num_stages
        return self._sized((1,) * self.num_blocks, self.num_blocks, topology, costs)

    def _sized(self, sizes: Sequence[int], num_blocks: int, topology: Topology, costs: Costs) -> tuple[Chunk, ...]:
        """Makes chunks of this many blocks each, the first with the embedding and the last with the head."""
        block = topology.num_stages / num_blocks
        whole = costs.t_f + costs.t_b + costs.t_w
        more = [(0.0, 0.0) for _ in sizes]
        more[0] = (0.0, self.embedding * whole / costs.t_b * block)
        more[-1] = (self.head * whole / costs.t_f * block, more[-1][1])
        return tuple(
            Chunk.of_size(size * block, size, more_f=more_f, more_b=more_b)
            for size, (more_f, more_b) in zip(sizes, more, strict=True)
        )

    def _cuts(
        self, num_blocks: int, topology: Topology, failed: frozenset[Worker], shape: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        D, P = topology.num_pipelines, topology.num_stages
        check_count("--blocks", num_blocks, least=1)
        if self.cuts is None:
            if num_blocks < len(shape):
                most, each = f"--blocks = {num_blocks}", "" if len(shape) == P else f" / {len(shape) // P}"
                needs = "every stage needs a block" if len(shape) == P else "every run of blocks needs one"
                raise SettingError("--stages", P, f"must be at most {most}{each}: {needs}")
            return [cut_by_costs([1.0] * num_blocks, len(shape), self.embedding, self.head)] * D
        if len(self.cuts) not in (1, D):
            raise SettingError("--cut", " ".join(self.cuts), f"must be one cut, or one for each of the {D} pipelines")
        cuts = [_cut(text, num_blocks, shape) for text in self.cuts]
        cuts *= D if len(cuts) == 1 else 1
        for d, cut in enumerate(cuts):
            for p, size in zip(shape, cut, strict=True):
                if not size and (d, p) not in failed:
                    text = self.cuts[d if len(self.cuts) > 1 else 0]
                    raise SettingError("--cut", text, f"must give stage {p} a block, as its worker {d}:{p} is not down")
        return cuts


def microbatches_of(text: str) -> int | tuple[int, ...]:
    """Parses ``--microbatches``: a number, or one for each pipeline.

    Raises:
        SettingError: the text has another form.
    """
    numbers = _numbers("--microbatches", text, "must be a whole number, or one for each pipeline, such as 17,17,17,13")
    return numbers[0] if len(numbers) == 1 else numbers


def _cut(text: str, num_blocks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = _numbers("--cut", text, "must be numbers of blocks, such as 16,15,15,15")
    if len(sizes) != len(shape):
        of_what = f"{len(shape)} stages" if len(set(shape)) == len(shape) else f"{len(shape)} runs, of stages {shape}"
        raise SettingError("--cut", text, f"must be one number of blocks for each of the {of_what}")
    if sum(sizes) != num_blocks:
        raise SettingError("--cut", text, f"must add up to --blocks = {num_blocks}, and adds up to {sum(sizes)}")
    return sizes


def _numbers(option: str, text: str, allowed: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingError(option, text, allowed)
    return tuple(map(int, parts))
