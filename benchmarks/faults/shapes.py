"""Shapes of runs: small models in float64, whose losses do not depend on which process computes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_STEPS, EVERY = 1600, 20
"""Iterations of a run, and between its checkpoints."""
_MODEL = f"""
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 2
ModelConfig.model_dim = 16
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = 32
ModelConfig.sequence_length = 32
ModelConfig.moe_pattern = (True,)
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 4
ExpertConfig.slots_per_rank = 5
ExpertConfig.capacity = @SlotCapacity()
Experiment.topology = @Topology()
Experiment.ranks = 'emulated'
Experiment.placement = @Symi()
Experiment.optimizer = @OptimizerConfig()
OptimizerConfig.warmup_steps = 2
Experiment.data = @DataConfig()
DataConfig.source = @TextFiles()
DataConfig.validation_share = 0.2
Experiment.num_microbatches = 2
Experiment.sequences_per_microbatch = 2
Experiment.num_steps = {NUM_STEPS}
Experiment.compute_dtype = 'float64'
Experiment.eval_every = 0
Experiment.checkpoint = @CheckpointConfig()
CheckpointConfig.every = {EVERY}
"""
_DEADLINES = ("start=120", "forming=30", "progress=40", "saving=40")
"""Arguments of `swift launch`: short time-outs that still suffice on a busy machine."""
STOPPING_S = 110.0 + 30.0
"""Seconds from a signal to the end of a run: the default of ``stopping``, and the 30 s that may follow."""
LATE_SERVICE_S = 120.0 + 40.0
"""Seconds until a checkpoint service that is frozen while it starts is killed: ``start`` and ``saving``."""


@dataclass(frozen=True)
class Shape:
    """A kind of run.

    Attributes:
        name: name for records.
        command: command of `swift`: `launch` or `train`.
        topology: numbers of pipelines, stages and expert ranks.
        settings: further settings of the configuration.
        flags: further arguments of the command line.
        num_nodes: number of machines that share the processes.
    """

    name: str
    command: str
    topology: tuple[int, int, int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    num_nodes: int = 1

    @property
    def members(self) -> list[str]:
        """Names of all processes that run iterations, as in events."""
        if self.command == "train":
            return []
        pipelines, stages, ranks = self.topology
        workers = [f"{pipeline}:{stage}" for pipeline in range(pipelines) for stage in range(stages)]
        return workers if ranks == 1 else [f"{w} rank {r}" if r else w for w in workers for r in range(ranks)]

    @property
    def is_elastic(self) -> bool:
        """Checks if a process is an expert rank, without which others can continue."""
        return self.command == "launch" and self.topology[2] > 1

    def members_of_node(self, node: int) -> list[str]:
        """Names of the members on a machine: an equal part, in order."""
        share, rest = divmod(len(self.members), self.num_nodes)
        assert rest == 0, f"{self.name}: machines have equal parts of the members"
        return self.members[node * share : (node + 1) * share]

    def stage_of(self, member: str) -> int:
        """Finds the stage that a process serves."""
        return int(member.split()[0].split(":")[1])

    def arguments(self) -> list[str]:
        """Further arguments of the command line."""
        if self.command == "train":
            return list(self.flags)
        processes = ["--processes", str(len(self.members)), "--restarts", "1000000"]
        return [*processes, "--deadline", *_DEADLINES, *self.flags]

    def write(self, path: Path, corpus: Path) -> Path:
        """Writes the configuration and returns its path."""
        settings: dict[str, Any] = dict(
            zip(
                ("Topology.num_pipelines", "Topology.num_stages", "Topology.num_expert_ranks"),
                self.topology,
                strict=True,
            )
        )
        settings |= {"TextFiles.pattern": str(corpus / "*.txt"), **self.settings}
        path.write_text(_MODEL + "".join(f"{name} = {value!r}\n" for name, value in settings.items()))
        return path


_DROPS = {"SlotCapacity.factor": 1.0}
_ELASTIC = {
    "SlotCapacity.factor": None,
    "CheckpointConfig.snapshot_every": 1,
    "Experiment.sequences_per_microbatch": 3,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("square", "launch", (2, 2, 1), _DROPS),
        Shape("row", "launch", (3, 1, 1), _DROPS),
        Shape("ranks", "launch", (1, 1, 3), _ELASTIC),
        Shape("restart", "launch", (2, 1, 1), _DROPS, ("--recovery", "restart")),
        Shape("nodes", "launch", (2, 2, 1), _DROPS, num_nodes=2),
        Shape("train", "train", (2, 1, 1), _DROPS, ("--prepare", "none")),
    )
}


def write_corpus(directory: Path) -> Path:
    """Writes some text to train on and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        text = "".join(chr(32 + (7 + number) * i * i % 90) for i in range(1000))
        (directory / f"{number}.txt").write_text(text)
    return directory
