"""The experiment: all settings of a run, and the loader, mesh, step spec and engine built from them.

Its failures are a list of texts, parsed into a ``FailureList`` that says which workers are down in which iterations. If
a stage has peers, a worker fails as a whole. With a single pipeline, expert ranks fail by themselves.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from swift.checkpoint.config import CheckpointConfig
from swift.config import checks
from swift.config.cuts import chunks_of, cut_model
from swift.data.config import DataConfig, Split
from swift.errors import SettingError, check_count, check_number, check_seed, renamed_settings
from swift.experts.capacity.exact import check_exact
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig, learning_rate, make_optimizer, with_warmup
from swift.experts.placement.policy import PlacementPolicy, check_slots
from swift.experts.placement.symi import Symi
from swift.models.config import ModelConfig, Remat, model_size
from swift.models.cuts import Chunks, Cut
from swift.schedules.planners.names import CustomPlanner, shape_of
from swift.schedules.problem import Chunk, Costs, Problem
from swift.topology import RankKind, Topology, Worker

if TYPE_CHECKING:
    from swift.data.loader import Loader
    from swift.mesh.live import LiveMesh
    from swift.pipeline.reconfigure.configuration import PlanSettings
    from swift.pipeline.reconfigure.engine import Engine, Prepare
    from swift.pipeline.step.spec import StepSpec
    from swift.schedules.adapt.moves import MigrationPolicy

FAILURES_SETTING = "Experiment.failures"

StageRank = tuple[int, int]
"""An expert rank in a run of one pipeline: (stage, rank)."""

_FORM = re.compile(r"\s*step\s+([0-9]+)\s*:\s*([a-z]+)\s+([0-9]+):([0-9]+)\s*")
_WITH_RANK = re.compile(r"(.*\S)\s+rank\s+([0-9]+)\s*")
"""Patterns of a failure's text: the event of a worker, and the optional rank at its end."""

_MOST_MICROBATCHES = 2**16
"""Most micro-batches of a pipeline: a schedule lists the operations of each."""


class FailureSource(Protocol):
    """A source of failures, asked before every window of iterations."""

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns the workers that are down in the window from ``first_step`` to ``last_step``, counted from 1.

        A window runs as one program, and after a failure within it the survivors run it again. So a worker that fails
        in a window counts as down from the window's first step. It rejoins at the first window that starts no earlier
        than its return.
        """

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns the expert ranks that are down in a window, by the rules of ``failed``."""


class FailureEvent(NamedTuple):
    """The failure or return of a worker, or of one of its expert ranks.

    Attributes:
        step: first iteration without the worker, or with it again; from 1.
        kind: failure or return.
        worker: (pipeline, stage).
        rank: expert rank of the worker; None: the whole worker.
    """

    step: int
    kind: Literal["fail", "rejoin"]
    worker: Worker
    rank: int | None = None

    @property
    def who(self) -> str:
        """Name of the worker or rank, for messages."""
        name = "worker {}:{}".format(*self.worker)
        return name if self.rank is None else f"rank {self.rank} of {name}"


@dataclass(frozen=True)
class FailureList:
    """Failures known in advance; a ``FailureSource``.

    >>> events = parse_failures(["step 20: fail 1:2", "step 45: rejoin 1:2"], Topology(2, 3), num_steps=60)
    >>> [sorted(events.failed(step, step)) for step in (19, 20, 44, 45)]
    [[], [(1, 2)], [(1, 2)], []]
    >>> sorted(events.failed(18, 21)), sorted(events.failed(43, 46))
    ([(1, 2)], [(1, 2)])

    Attributes:
        events: events by step; events of the same step in the order of the list.
    """

    events: tuple[FailureEvent, ...] = ()

    def failed(self, first_step: int, last_step: int) -> frozenset[Worker]:
        """Returns the workers that are down in a window, see ``FailureSource``."""
        return frozenset(worker for worker, rank in self._down(first_step, last_step) if rank is None)

    def lost_ranks(self, first_step: int, last_step: int) -> frozenset[StageRank]:
        """Returns the ranks that are down in a window, see ``FailureSource``."""
        down = self._down(first_step, last_step)
        return frozenset((stage, rank) for (_, stage), rank in down if rank is not None)

    def is_over(self, step: int) -> bool:
        """Whether no worker fails or rejoins after this step."""
        return all(event.step <= step for event in self.events)

    def _down(self, first_step: int, last_step: int) -> set[tuple[Worker, int | None]]:
        down: set[tuple[Worker, int | None]] = set()
        for step, kind, worker, rank in self.events:
            if kind == "fail" and step <= last_step:
                down.add((worker, rank))
            elif kind == "rejoin" and step <= first_step:
                down.discard((worker, rank))
        return down


def parse_failures(texts: Sequence[str], topology: Topology, num_steps: int, window: int = 1) -> FailureList:
    """Parses the failure list of an experiment.

    Args:
        texts: texts such as ``step 20: fail 1:2`` and ``step 45: rejoin 1:2`` in any order; with one pipeline also
            ``step 20: fail 0:0 rank 3``.
        topology: topology of the cluster.
        num_steps: number of iterations of the experiment.
        window: number of iterations that run as one program.

    Raises:
        SettingError: a text does not have this form, or names a step, worker or rank that does not exist; a worker
            or rank fails that is down, or rejoins that is live; or in some window a stage would have no live
            worker, or the run no expert rank.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SettingError(FAILURES_SETTING, texts, "must be a list of texts, such as ['step 20: fail 1:2']")
    parsed = [(text, _parse(text, topology, num_steps)) for text in texts]
    parsed.sort(key=lambda pair: pair[1].step)
    down: dict[tuple[Worker, int | None], int] = {}
    for text, event in parsed:
        _check_turn(text, event, down, topology)
        if event.kind == "fail":
            down[event.worker, event.rank] = event.step
        else:
            del down[event.worker, event.rank]
    failures = FailureList(tuple(event for _, event in parsed))
    for text, event in parsed:
        _check_window(text, event, failures, topology, window)
    return failures


def parse_rank(text: str) -> tuple[str, int | None]:
    """Splits a failure's text into the part before the rank, and the rank; None if it names no rank.

    >>> parse_rank("step 20: fail 0:0 rank 3"), parse_rank("step 20: fail 1:2")
    (('step 20: fail 0:0', 3), ('step 20: fail 1:2', None))
    """
    match = _WITH_RANK.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


def parse_event(
    setting: str, text: str, kinds: Sequence[str], topology: Topology, last_step: tuple[str, int]
) -> tuple[int, str, Worker]:
    """Parses one text such as ``step 20: fail 1:2`` into (step, kind, worker), without regard to other events.

    Args:
        setting: setting or option that has the text, for errors.
        text: text to parse.
        kinds: kinds of events.
        topology: topology of the cluster.
        last_step: last step that is allowed: (name of the setting, value).

    Raises:
        SettingError: the text does not have this form, or names a step or a worker that does not exist.
    """
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in kinds:
        first, *other_kinds = kinds
        allowed = f"must be 'step STEP: {first} PIPELINE:STAGE'"
        raise SettingError(setting, text, allowed + "".join(f" or 'step STEP: {other} ...'" for other in other_kinds))
    step, worker, (name, last) = int(match[1]), (int(match[3]), int(match[4])), last_step
    if not 1 <= step <= last:
        raise SettingError(setting, text, f"the step must be 1 to {name} = {last}")
    if worker not in topology.workers:
        shape = f"{topology.num_pipelines} pipelines x {topology.num_stages} stages"
        raise SettingError(setting, text, f"no such worker among {shape}, both counted from 0")
    return step, match[2], worker


def _parse(text: str, topology: Topology, num_steps: int) -> FailureEvent:
    worker_text, rank = parse_rank(text)
    last_step = ("Experiment.num_steps", num_steps)
    try:
        step, kind, worker = parse_event(FAILURES_SETTING, worker_text, ("fail", "rejoin"), topology, last_step)
    except SettingError as error:
        raise SettingError(FAILURES_SETTING, text, error.allowed) from None
    if rank is not None and topology.num_pipelines > 1:
        allowed = "may name a rank with one pipeline only: where a stage has peers, its worker fails as a whole"
        raise SettingError(FAILURES_SETTING, text, allowed)
    if rank is not None and rank >= topology.num_expert_ranks:
        raise SettingError(FAILURES_SETTING, text, f"no such rank among {topology.num_expert_ranks}, counted from 0")
    return FailureEvent(step, "fail" if kind == "fail" else "rejoin", worker, rank)


def _check_turn(
    text: str, event: FailureEvent, down: Mapping[tuple[Worker, int | None], int], topology: Topology
) -> None:
    """Raises SettingError if an event is impossible while ``down`` are down, each since its step."""
    (d, p), since = event.worker, down.get((event.worker, event.rank))
    if event.kind == "rejoin":
        if since is None:
            raise SettingError(FAILURES_SETTING, text, f"{event.who} is live at that time")
        if event.rank is not None and since == event.step:
            raise SettingError(FAILURES_SETTING, text, f"{event.who} fails in that iteration, and can rejoin after it")
    elif since is not None:
        raise SettingError(FAILURES_SETTING, text, f"{event.who} is down already at that time")
    elif event.rank is not None:
        if len({rank for _, rank in down} | {event.rank}) == topology.num_expert_ranks:
            raise SettingError(FAILURES_SETTING, text, f"leaves {_no_rank(topology)}")
    elif all(((peer, p), None) in down for peer in range(topology.num_pipelines) if peer != d):
        hint = f"; a rank of it can fail: '{text.strip()} rank 0'" if topology.num_pipelines == 1 else ""
        raise SettingError(FAILURES_SETTING, text, f"leaves stage {p} without a live worker{hint}")


def _no_rank(topology: Topology) -> str:
    """Describes what too many failures leave the run without: a rank lost in one stage is lost to all stages."""
    return "no live expert rank" + (" that all stages have" if topology.num_stages > 1 else "")


def _check_window(text: str, event: FailureEvent, failures: FailureList, topology: Topology, window: int) -> None:
    """Raises SettingError if a failure and others in the same window leave a stage without a live worker or rank.

    The check takes the window that ends with the failure, since any window may occur: evaluations, checkpoints and
    resumed runs shift where windows begin.
    """
    if event.kind == "rejoin":
        return
    first, last, stage = max(1, event.step - window + 1), event.step, event.worker[1]
    how = f"in a window of Experiment.window = {window} iterations, what fails is down from the start, and what "
    how += "rejoins is back after the end"
    down = failures.failed(first, last)
    if all((d, stage) in down for d in range(topology.num_pipelines)):
        raise SettingError(FAILURES_SETTING, text, f"may leave stage {stage} without a live worker: {how}")
    if len({rank for _, rank in failures.lost_ranks(first, last)}) == topology.num_expert_ranks:
        raise SettingError(FAILURES_SETTING, text, f"may leave {_no_rank(topology)}: {how}")


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
        planner: planner of the pipeline schedules, see ``swift plan``; or a user's own ``schedules.OwnPlanner``. With
            ``v`` each stage holds two runs of layers: stage 0 the model's first and last, and so on inwards.
        window: iterations that a pipeline runs as one program, in which the stages update one after the other. A window
            in which a gradient would have been clipped is run again, one iteration at a time.
        memory_limit: memory that the plan gives a worker, as a multiple of what the forward pass F keeps of one
            micro-batch; None: no limit. Every worker allocates each kind of buffer for the worker that needs the most:
            see ``start`` in the events.
        remat: what is recomputed in the backward pass, keeping only its input: ``none``, ``attention``, or the whole
            ``block``, which costs a third more FLOPs; True is ``block``.
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
        checkpoint: settings of checkpoints and snapshots.
        target_loss: training loss, in nats per token; the summary counts the iterations to reach it. None: not counted.
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
    attention: Literal["auto", "plain", "blockwise", "tiled", "splash", "triton", "cudnn"] = "auto"
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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    target_loss: float | None = None

    def __post_init__(self) -> None:
        checks.check_parts(vars(self))
        checks.check_choices(vars(self))
        for name in ("num_steps", "sequences_per_microbatch", "num_eval_batches", "window"):
            check_count(f"Experiment.{name}", getattr(self, name), least=1)
        check_count("Experiment.num_microbatches", self.num_microbatches, least=1, most=_MOST_MICROBATCHES)
        if isinstance(self.target_loss, int | float):
            check_number("Experiment.target_loss", self.target_loss)
        check_count("Experiment.eval_every", self.eval_every, least=0)
        check_seed("Experiment.seed", self.seed)
        checks.check_sequences(self.sequences_per_microbatch, self.model.sequence_length, self.topology)
        check_slots(self.experts.num_classes, self.topology.num_expert_ranks, self.experts.slots_per_rank)
        checks.check_rules(self.experts, self.placement)
        if self.experts.is_exact:
            check_exact(self.experts.num_classes, self.topology.num_expert_ranks, self.experts.slots_per_rank)
        self.checkpoint.check_classes(self.experts.num_classes)
        checks.check_microbatches(self.microbatches, self.topology, self.num_microbatches)
        checks.check_cuts(self.chunks, self.planner)
        checks.check_adapting(vars(self), self.chunks)
        # Check here what would otherwise fail only after files are written and JAX has started.
        object.__setattr__(self, "optimizer", with_warmup(self.optimizer, self.num_steps))
        checks.check_warmup(self.optimizer, self.num_steps)
        learning_rate(self.optimizer, self.num_steps)
        _check_pipeline(self)
        checks.check_snapshots(self.checkpoint, self.topology)
        checks.check_memory(self.optimizer.memory, self.ranks, self.chunks, self.adapt)
        if self.optimizer.layout == "coupled":
            checks.check_coupled(vars(self))

    @property
    def failure_list(self) -> FailureList:
        """The failures, parsed and checked."""
        return parse_failures(self.failures, self.topology, self.num_steps, self.window)

    @property
    def move_rule(self) -> "MigrationPolicy | None":
        """Rule that decides when survivors of a failure take over blocks; None: never."""
        if self.adapt == "reroute":
            return None
        from swift.schedules.adapt.moves import Downtimes, MigrationPolicy

        return MigrationPolicy(Downtimes(self.expected_downtime), is_always=self.adapt in ("reassign", "recut"))

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in an iteration's global batch."""
        num_sequences = self.topology.num_pipelines * self.num_microbatches * self.sequences_per_microbatch
        return num_sequences * self.model.sequence_length

    def loader(self, split: Split, corpus: Path | None = None) -> "Loader":
        """Makes the loader of a split.

        Args:
            split: split to load.
            corpus: index of the corpus, see ``find_index``; None: the corpus is read and tokenized now.
        """
        from swift.data.loader import Loader

        with renamed_settings({"Loader.sequence_length": "ModelConfig.sequence_length"}):
            return Loader(
                self.data,
                split,
                num_microbatches=self.topology.num_pipelines * self.num_microbatches,
                sequences_per_microbatch=self.sequences_per_microbatch,
                sequence_length=self.model.sequence_length,
                seed=self.seed,
                corpus=corpus,
                # After a failure the run continues from a state that all processes have. By then one process may have
                # read data for the window after its current one, while another has yet to finish the window before.
                num_kept=3 * self.window if split == "train" else self.num_eval_batches,
            )

    def live_mesh(self) -> "LiveMesh":
        """Makes the mesh of all workers, on the devices that ``ranks`` names."""
        from swift.mesh.live import live_mesh

        with renamed_settings({"ranks": "Experiment.ranks"}):
            return live_mesh(self.topology, self.ranks)

    def step_spec(self, live: "LiveMesh | None" = None, platform: str | None = None) -> "StepSpec":
        """Makes the spec of a training step. This reads the tokenizer, which fails if its file is lost.

        Args:
            live: mesh; None: a new mesh of all workers.
            platform: platform that will run the step, if this process has no such devices; None: the mesh's platform.
        """
        from swift.config import layouts
        from swift.models.gpt import GPT
        from swift.pipeline.step.spec import StepSpec

        if self.compute_dtype == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
            raise SettingError("Experiment.compute_dtype", "float64", "needs the JAX setting jax_enable_x64")
        live = live or self.live_mesh()
        checks.check_vocabulary(self.vocab_size, self.data.vocab_size)
        separator = self.data.separator if self.separate_documents else None
        kernel = layouts.kernel(vars(self), live, platform)
        shares = layouts.sharing_ranks(live, embedding=self.embedding, head=self.head)
        sizes = {"vocab_size": self.vocab_size, "num_classes": self.experts.num_classes} | shares
        gpt = GPT(self.model, **sizes, kernel=kernel, separator=separator, has_slices=self.experts.is_exact)
        layouts_of = partial(layouts.make_layouts, compute_dtype=self.compute_dtype, wire_dtype=self.wire_dtype)
        with renamed_settings(checks.STEP_SETTINGS):
            return StepSpec(
                gpt=gpt,
                experts=self.experts,
                policy=self.placement,
                live=live,
                optimizer=make_optimizer(self.optimizer, self.num_steps),
                learning_rate=learning_rate(self.optimizer, self.num_steps),
                clip_norm=self.optimizer.clip_norm,
                decays_matrices_only=self.optimizer.decayed == "matrices",
                layouts=layouts_of(gpt, self.experts, self.optimizer, self.placement, num_ranks=live.num_ranks),
                compute_dtype=jnp.dtype(self.compute_dtype),
                num_microbatches=self.topology.num_pipelines * self.num_microbatches,
                num_hot_rows=layouts.num_hot(gpt, self.sequences_per_microbatch, self.num_microbatches),
                remat=self.remat,
                memory="device" if live.virtual else self.optimizer.memory,  # a virtual mesh only stores states
                cut=self.blocks,
                chunks=self.chunks,
            )

    def engine(self, failed: frozenset[Worker], prepare: "Prepare", live: "LiveMesh | None" = None) -> "Engine":
        """Makes the engine of this experiment, planned for the first failures; on a new mesh unless one is given.

        Raises:
            SettingError: there are too few devices or too little memory, or no plan for these failures.
        """
        from swift.pipeline.reconfigure.engine import Engine

        spec = self.step_spec(live)
        with renamed_settings({"planner": "Experiment.planner"}):
            return Engine(spec, self.plan_settings(spec), self.sequences_per_microbatch, prepare, failed)

    def problem(self, costs: Costs, chunks: tuple[Chunk, ...] = ()) -> Problem:
        """Makes the planning problem of a window on all workers; without ``chunks`` all chunks cost the same.

        Raises:
            SettingError: there is too little memory for a single micro-batch.
        """
        with renamed_settings({"Problem.memory_limit": "Experiment.memory_limit"}):
            numbers, holders = self.microbatches or self.num_microbatches, self.chunks.stage_DC
            problem = Problem(
                self.topology, numbers, costs=costs, num_iterations=self.window, chunks=chunks, stage_of_chunk=holders
            )
            return problem.limited(self.memory_limit)

    def plan_settings(self, spec: "StepSpec") -> "PlanSettings":
        """Makes the settings that all plans of this experiment share.

        Raises:
            SettingError: there is too little memory for a single micro-batch.
        """
        from swift.pipeline.reconfigure.configuration import PlanSettings
        from swift.pipeline.step.costs import plan_costs
        from swift.pipeline.step.single_worker import sequences_per_rank

        per_rank = sequences_per_rank(self.sequences_per_microbatch, self.topology.num_expert_ranks)
        costs, chunks, sizes = plan_costs(spec, per_rank)
        return PlanSettings(self.problem(costs, chunks), self.planner, sizes, adapt=self.adapt)

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

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of the model, and the workers that hold them."""
        return chunks_of(self.cuts, shape_of(self.planner, self.topology.num_stages))

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding: the model's setting, or else the tokenizer's number of tokens."""
        return self.data.vocab_size if self.model.vocab_size is None else self.model.vocab_size

    @cached_property
    def blocks(self) -> Cut:
        """Layers of each stage in a checkpoint: the first pipeline's cut, unless its stages hold several runs each."""
        if self.cuts[0].num_stages == self.topology.num_stages:
            return self.cuts[0]
        return cut_model(self.model, self.experts, self.vocab_size, self.topology, None)[0]

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Layers of each stage by pipeline, or of each run if stages hold several runs of layers."""
        shape = shape_of(self.planner, self.topology.num_stages)
        return cut_model(self.model, self.experts, self.vocab_size, self.topology, self.cut, shape)


def _check_pipeline(experiment: Experiment) -> None:
    checks.check_single_worker(vars(experiment))
    checks.check_window(experiment.window, experiment.num_steps, experiment.eval_every, experiment.checkpoint)
    experiment.problem(Costs())
    failing = {event.rank for event in experiment.failure_list.events}
    checks.check_planner(experiment.planner, fails=None in failing)
    checks.check_sharded(experiment.embedding, experiment.head, experiment.model, loses_ranks=bool(failing - {None}))
