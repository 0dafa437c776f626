"""The experiment: all settings of a run, as data.

Each class checks the ranges of its settings. ``swift.config.checks.check`` refuses settings that exclude each other;
reading a gin file and ``train`` call it. ``swift.train.build`` makes the loader, mesh, step and engine.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal

from swift.checkpoint.config import CheckpointConfig
from swift.data.config import DataConfig
from swift.errors import SettingError, check_choices, check_count, check_number, check_seed
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig, with_warmup
from swift.experts.placement.policy import PlacementPolicy
from swift.experts.placement.symi import Symi
from swift.models.config import AttentionKernel, ModelConfig, Remat, model_size
from swift.schedules.planners.names import CustomPlanner
from swift.topology import RankKind, Topology

FAILURES_SETTING = "Experiment.failures"
_PARTS = {
    "model": ModelConfig,
    "experts": ExpertConfig,
    "topology": Topology,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
}
_MOST_MICROBATCHES = 2**16
"""Most micro-batches of a pipeline: a schedule lists the operations of each."""


@dataclass(frozen=True)
class Experiment:
    """The settings of a run; the defaults are the demo's.

    Attributes:
        model: shape of the GPT.
        experts: settings of the expert layers.
        placement: policy that computes a new placement of the experts every iteration.
        topology: pipelines, stages and expert ranks.
        ranks: ``emulated`` CPU devices, the machine's ``devices``, or ``virtual`` ranks of one device.
        data: documents and tokens.
        optimizer: optimizer and schedule.
        compute_dtype: dtype of slots and activations; master weights are at least float32.
        wire_dtype: dtype of gradients on the wire; ``compute`` is the compute dtype.
        attention: attention kernel. On any device: ``plain``, which keeps all T x T scores, and ``blockwise``, which
            keeps one block of them. For CPUs ``tiled``, with smaller blocks; for TPUs ``splash``; for GPUs in 16 bits
            ``triton`` and ``cudnn``. ``auto`` chooses; for float64 it takes ``plain``.
        separate_documents: whether attention stops at document boundaries within a sequence.
        embedding: ``replicated`` on every expert rank, or ``sharded`` over the ranks. Sharded, a rank fetches each row
            that its tokens need once: less memory, and fewer bytes unless an iteration has many micro-batches
            (docs/models.md).
        head: matrix of the head: ``replicated`` on every expert rank, or ``sharded`` over the ranks by vocabulary.
            Sharded, a rank scores the tokens of all ranks for its shard: less memory, but more bytes (docs/models.md).
        seed: seed of the parameters and of the order of the data.
        num_steps: number of iterations.
        num_microbatches: number of micro-batches of an iteration in each pipeline.
        microbatches: number for each pipeline if they differ, such as ``(17, 17, 17, 13)`` for a mean of 16.
        planner: planner of the pipeline schedules, see ``swift plan``; or your own ``schedules.CustomPlanner``. With
            ``v`` each stage holds two runs of layers: stage 0 the model's first and last, and so on inwards.
        window: iterations that a pipeline runs as one program, in which the stages update one after the other. A window
            in which a gradient would have been clipped is run again, one iteration at a time.
        memory_limit: memory that the plan gives a worker, as a multiple of what the forward pass F keeps of one
            micro-batch; None: no limit. Every worker allocates each kind of buffer for the worker that needs the most:
            see ``start`` in the events.
        remat: what is recomputed in the backward pass, keeping only its input: ``none``, ``attention``, or the whole
            ``block``, which costs a third more FLOPs.
        cut: layers of each stage, such as ``(5, 4, 4, 3)``, or a list for each pipeline, such as ``((5, 3), (4, 4))``;
            with the planner ``v``, layers of each run. None: an even cut if all parts are then alike, otherwise the cut
            with the shortest longest part.
        failures: workers (pipeline:stage) that fail or rejoin before an iteration, such as ``['step 20: fail 1:2',
            'step 45: rejoin 1:2']``; with one pipeline also expert ranks, ``'step 20: fail 0:0 rank 3'``. A failure
            within a window lasts for the whole window.
        adapt: what the survivors of a failure do: ``reroute`` micro-batches to peers; or, once a better plan is ready,
            ``reassign`` roles or ``recut`` pipelines in any case; ``auto`` does either if it pays before a worker
            returns.
        expected_downtime: expected time until a worker returns, s; None: learnt from the workers that have returned.
        sequences_per_microbatch: sequences of a micro-batch, over all expert ranks; if this is not a multiple of the
            number of ranks, some ranks compute on padding.
        eval_every: iterations between evaluations on the validation split; 0: no evaluations.
        num_eval_batches: batches of an evaluation, always the first ones of the split.
        patience: evaluations in a row without an improvement after which the run stops, with a checkpoint; None: it
            runs to its end.
        min_improvement: nats per token by which the validation loss must fall to count as an improvement.
        checkpoint: settings of checkpoints and snapshots.
        target_loss: training loss, in nats per token; the summary counts the iterations to reach it. None: not counted.
        observers: your own observers of the run, such as ``(@my_code.Hottest(),)``: dataclasses that inherit from
            ``swift.runlog.Observer``. They are not stored, so a resumed run may have others.
    """

    model: ModelConfig = field(default_factory=lambda: model_size("demo"))
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    placement: PlacementPolicy = field(default_factory=Symi)
    topology: Topology = field(default_factory=lambda: Topology(num_expert_ranks=8))
    ranks: RankKind = "emulated"
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    wire_dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    attention: Literal["auto", AttentionKernel] = "auto"
    separate_documents: bool = False
    embedding: Literal["replicated", "sharded"] = "replicated"
    head: Literal["replicated", "sharded"] = "replicated"
    seed: int = 0
    num_steps: int = 300
    num_microbatches: int = 1
    microbatches: tuple[int, ...] | None = None
    planner: str | CustomPlanner = "lockstep"
    window: int = 1
    memory_limit: float | None = None
    remat: Remat = "none"
    cut: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    failures: tuple[str, ...] = ()
    adapt: Literal["reroute", "reassign", "recut", "auto"] = "reroute"
    expected_downtime: float | None = None
    sequences_per_microbatch: int = 16
    eval_every: int = 100
    num_eval_batches: int = 8
    patience: int | None = None
    min_improvement: float = 0.0
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    target_loss: float | None = None
    observers: tuple[object, ...] = field(default=(), metadata={"is_stored": False})

    def __post_init__(self) -> None:
        check_choices(self)
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise SettingError(f"Experiment.{name}", getattr(self, name), f"must be @{kind.__name__}()")
        if isinstance(self.placement, type) or not hasattr(self.placement, "init"):
            raise SettingError("Experiment.placement", self.placement, "must be a placement policy, such as @Symi()")
        for observer in self.observers if isinstance(self.observers, tuple | list) else (None,):
            is_observer = all(hasattr(observer, name) for name in ("begin", "on_step", "on_event", "end"))
            if not is_observer or isinstance(observer, type) or not is_dataclass(observer):
                allowed = "must be dataclasses that inherit from swift.runlog.Observer, such as (@my_code.Mine(),)"
                raise SettingError("Experiment.observers", self.observers, allowed)
        for name in ("num_steps", "sequences_per_microbatch", "num_eval_batches", "window"):
            check_count(f"Experiment.{name}", getattr(self, name), least=1)
        check_count("Experiment.num_microbatches", self.num_microbatches, least=1, most=_MOST_MICROBATCHES)
        if isinstance(self.target_loss, int | float):
            check_number("Experiment.target_loss", self.target_loss)
        elif self.target_loss is not None:
            raise SettingError("Experiment.target_loss", self.target_loss, "must be a number or None")
        check_count("Experiment.eval_every", self.eval_every, least=0)
        check_number("Experiment.min_improvement", self.min_improvement, least=0)
        if self.patience is not None:
            check_count("Experiment.patience", self.patience, least=1)
        check_seed("Experiment.seed", self.seed)
        object.__setattr__(self, "optimizer", with_warmup(self.optimizer, self.num_steps))

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in an iteration's global batch."""
        num_sequences = self.topology.num_pipelines * self.num_microbatches * self.sequences_per_microbatch
        return num_sequences * self.model.sequence_length

    @property
    def tokens_per_evaluation(self) -> int:
        """Number of tokens of each source in an evaluation, if the validation split has so many."""
        return self.num_eval_batches * self.tokens_per_step

    @property
    def vocab_size(self) -> int:
        """Number of embedding rows: the model's setting, or else how many tokens the tokenizer has."""
        return self.data.vocab_size if self.model.vocab_size is None else self.model.vocab_size

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint must share with the run that reads it.

        In the layout ``coupled`` the optimizer state is tied to ranks and slots, so these belong to the identity too.
        """
        places = {"ExpertConfig.slots_per_rank": self.experts.slots_per_rank, "Topology": repr(self.topology)}
        narrow = {} if self.optimizer.moments == "master" else {"OptimizerConfig.moments": self.optimizer.moments}
        return (
            (places if self.optimizer.layout == "coupled" else {})
            | narrow
            | {
                "ModelConfig": repr(self.model),
                "vocabulary": self.vocab_size,
                "ExpertConfig.num_classes": self.experts.num_classes,
                "OptimizerConfig.name": self.optimizer.moments_of,
                "OptimizerConfig.layout": self.optimizer.layout,
                "Experiment.placement": repr(self.placement),
                "Experiment.compute_dtype": self.compute_dtype,
            }
        )
