"""Refuses settings that exclude each other, such as snapshots and peers, or tied state and failures."""

from collections.abc import Mapping, Sequence
from typing import Any

from swift.checkpoint.config import CheckpointConfig
from swift.config.cuts import model_chunks, planning_problem
from swift.config.experiment import Experiment
from swift.config.failures import failure_list
from swift.data.config import DataConfig
from swift.errors import MOST_COUNT, SettingError, check_number
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig, learning_rate
from swift.experts.placement.policy import PlacementPolicy, Static, check_slots
from swift.models.config import ModelConfig
from swift.models.cuts import Chunks
from swift.schedules.planners.names import FAULT_FREE, PLANNER_NAMES, SHAPES, CustomPlanner
from swift.schedules.problem import Costs
from swift.topology import RankKind, Topology


def check(experiment: Experiment) -> None:
    """Raises SettingError if settings exclude each other, before any file is written and any program is compiled."""
    settings, topology, experts = vars(experiment), experiment.topology, experiment.experts
    check_sequences(experiment.sequences_per_microbatch, experiment.model.sequence_length, topology)
    check_slots(experts.num_classes, topology.num_expert_ranks, experts.slots_per_rank)
    experts.capacity.check_slots(experts, topology.num_expert_ranks)
    check_rules(experts, experiment.placement)
    experiment.checkpoint.check_classes(experts.num_classes)
    check_microbatches(experiment.microbatches, topology, experiment.num_microbatches)
    chunks = model_chunks(experiment)
    check_cuts(chunks, experiment.planner)
    check_adapting(settings, chunks)
    check_chats(experiment.data, separates=experiment.separate_documents)
    check_warmup(experiment.optimizer, experiment.num_steps)
    learning_rate(experiment.optimizer, experiment.num_steps)
    check_single_worker(settings)
    check_window(experiment.window, experiment.num_steps, experiment.eval_every, experiment.checkpoint)
    planning_problem(experiment, Costs())
    lost_ranks = {event.rank for event in failure_list(experiment).events}
    check_planner(experiment.planner, fails=None in lost_ranks)
    check_sharded(experiment.embedding, experiment.head, experiment.model, loses_ranks=bool(lost_ranks - {None}))
    check_snapshots(experiment.checkpoint, topology)
    check_validations(settings)
    check_memory(experiment.optimizer.memory, experiment.ranks, chunks, experiment.adapt)
    if experiment.optimizer.layout == "coupled":
        check_coupled(settings)


def check_chats(data: DataConfig, *, separates: bool) -> None:
    """Raises SettingError if chats are to be separated by a token that may end each answer."""
    if separates and any(chat.end_of_document is None for chat in data.chats):
        allowed = "needs Chat.end_of_document: a token that no chat contains, such as the tokenizer's padding token"
        raise SettingError("Experiment.separate_documents", separates, allowed)


def check_warmup(optimizer: OptimizerConfig, num_steps: int) -> None:
    """Raises SettingError if the run would end during the learning rate's warm-up."""
    if optimizer.schedule is None and optimizer.decay_steps is None and (optimizer.warmup_steps or 0) >= num_steps:
        allowed = f"must be below Experiment.num_steps = {num_steps}"
        raise SettingError("OptimizerConfig.warmup_steps", optimizer.warmup_steps, allowed)


def check_snapshots(checkpoint: CheckpointConfig, topology: Topology) -> None:
    """Raises SettingError if snapshots are requested but no other rank can keep them, or peers make them needless."""
    setting, every = "CheckpointConfig.snapshot_every", checkpoint.snapshot_every
    if every and topology.num_pipelines > 1:
        raise SettingError(setting, every, "must be 0 with several pipelines, where peers have what is lost")
    if every and topology.num_expert_ranks == 1:
        raise SettingError(setting, every, "must be 0 with one expert rank: there is no other to keep its snapshot")


def check_validations(settings: Mapping[str, Any]) -> None:
    """Raises SettingError if settings need validation losses that the run does not compute."""
    eval_every, checkpoint = settings["eval_every"], settings["checkpoint"]
    if settings["patience"] is not None and not eval_every:
        raise SettingError("Experiment.patience", settings["patience"], "needs a number as Experiment.eval_every")
    if settings["min_improvement"] and settings["patience"] is None:
        allowed = "would change nothing: it needs a number as Experiment.patience"
        raise SettingError("Experiment.min_improvement", settings["min_improvement"], allowed)
    if checkpoint.num_best and not (eval_every and checkpoint.every and checkpoint.every % eval_every == 0):
        allowed = f"needs CheckpointConfig.every = {checkpoint.every} to be a multiple of Experiment.eval_every"
        allowed += f" = {eval_every}, so that every checkpoint has a validation loss"
        raise SettingError("CheckpointConfig.num_best", checkpoint.num_best, allowed)


def check_coupled(settings: Mapping[str, Any]) -> None:
    """Raises SettingError if the layout ``coupled``, which ties state to ranks and slots, is not possible here."""
    setting, topology, experts = "OptimizerConfig.layout", settings["topology"], settings["experts"]
    checkpoint = settings["checkpoint"]
    if len(topology.workers) > 1:
        shape = (topology.num_pipelines, topology.num_stages)
        allowed = f"runs with one pipeline of one stage only, and the topology has {shape}: use decoupled"
        raise SettingError(setting, "coupled", allowed)
    if experts.capacity.fetches_weights:
        allowed = "ties state to slots, which change in every micro-batch with ExpertConfig.capacity = @ExactCapacity()"
        raise SettingError(setting, "coupled", f"{allowed}: use decoupled")
    if checkpoint.experts_per_layer != "all":
        allowed = "must be 'all' with OptimizerConfig.layout = 'coupled', where no expert has a state of its own"
        raise SettingError("CheckpointConfig.experts_per_layer", checkpoint.experts_per_layer, allowed)
    if checkpoint.snapshot_every:
        allowed = "must be 0 with OptimizerConfig.layout = 'coupled', whose state is tied to its ranks"
        raise SettingError("CheckpointConfig.snapshot_every", checkpoint.snapshot_every, allowed)
    if settings["failures"]:
        allowed = "ties state to its ranks, and some fail in Experiment.failures: use decoupled"
        raise SettingError(setting, "coupled", allowed)
    if not isinstance(settings["placement"], Static):
        return
    if settings["ranks"] == "virtual":
        allowed = "with a static placement reduces over groups of ranks, which virtual ranks cannot: use decoupled"
        raise SettingError(setting, "coupled", allowed)
    classes, slots, num_ranks = experts.num_classes, experts.slots_per_rank, topology.num_expert_ranks
    if classes % slots or num_ranks % max(1, classes // slots):
        allowed = f"needs ExpertConfig.slots_per_rank = {slots} to divide ExpertConfig.num_classes = {classes}, "
        allowed += f"and the quotient to divide Topology.num_expert_ranks = {num_ranks}"
        raise SettingError(setting, "coupled", allowed)


def check_memory(memory: str, ranks: RankKind, chunks: Chunks, adapt: str) -> None:
    """Raises SettingError if optimizer slices cannot be kept in host memory with these settings."""
    if memory == "device":
        return
    needs = {
        "Experiment.ranks of one device each, not 'virtual'": ranks != "virtual",
        "one run of layers per worker: equal cuts, and a planner of one": chunks.is_one_chunk_per_worker,
        "Experiment.adapt = 'reroute', which gives no worker blocks of another": adapt == "reroute",
    }
    for what, is_so in needs.items():
        if not is_so:
            raise SettingError("OptimizerConfig.memory", memory, f"needs {what}")


def check_rules(experts: ExpertConfig, placement: PlacementPolicy) -> None:
    """Raises SettingError if DeepSpeed's expert rules are used without the static placement that they require."""
    if experts.capacity.follows_deepspeed and not isinstance(placement, Static):
        allowed = "needs Experiment.placement = @Static(), with which every expert has as many replicas as others"
        raise SettingError("SlotCapacity.rules", "deepspeed", allowed)


def check_single_worker(settings: Mapping[str, Any]) -> None:
    """Raises SettingError if a single worker has a setting that only works with several."""
    if len(settings["topology"].workers) > 1:
        return
    for name, only in (("window", 1), ("memory_limit", None)):
        if settings[name] != only:
            raise SettingError(f"Experiment.{name}", settings[name], f"must be {only} with a single worker")


def check_sharded(embedding: str, head: str, model: ModelConfig, *, loses_ranks: bool) -> None:
    """Raises SettingError if an embedding or head is sharded although it is tied, or although ranks may be lost."""
    if model.tied_embeddings:
        allowed = "must be 'replicated' with ModelConfig.tied_embeddings = True: every rank has the whole embedding"
    elif loses_ranks:
        copies = "each is a copy of what the others lose"
        allowed = f"must be 'replicated' where Experiment.failures has expert ranks: {copies}"
    else:
        return
    for name, value in (("embedding", embedding), ("head", head)):
        if value == "sharded":
            raise SettingError(f"Experiment.{name}", value, allowed)


def check_sequences(sequences_per_microbatch: int, sequence_length: int, topology: Topology) -> None:
    """Raises SettingError if a micro-batch has fewer sequences than ranks, or more tokens than int32 counts."""
    if sequences_per_microbatch * sequence_length > MOST_COUNT:
        most = MOST_COUNT // sequence_length
        allowed = f"must be at most {most:,} with ModelConfig.sequence_length = {sequence_length}"
        raise SettingError("Experiment.sequences_per_microbatch", sequences_per_microbatch, allowed)
    if sequences_per_microbatch < topology.num_expert_ranks:
        allowed = f"must be at least Topology.num_expert_ranks = {topology.num_expert_ranks}"
        raise SettingError("Experiment.sequences_per_microbatch", sequences_per_microbatch, allowed)


def check_microbatches(microbatches: Sequence[int] | None, topology: Topology, num_microbatches: int) -> None:
    """Raises SettingError unless there is a number for each pipeline, and the numbers add up to the iteration's."""
    setting, number = "Experiment.microbatches", topology.num_pipelines
    if microbatches is None:
        return
    if not isinstance(microbatches, tuple | list) or len(microbatches) != number:
        raise SettingError(setting, microbatches, f"must be a number for each of Topology.num_pipelines = {number}")
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in microbatches):
        raise SettingError(setting, microbatches, "must be whole numbers of at least 1")
    if sum(microbatches) != number * num_microbatches:
        mean = f"{number} times Experiment.num_microbatches = {num_microbatches}"
        raise SettingError(setting, microbatches, f"must sum to {mean}, not {sum(microbatches)}")


def check_adapting(settings: Mapping[str, Any], chunks: Chunks) -> None:
    """Raises SettingError if blocks are to move after a failure but cannot, or a downtime is set but never used."""
    adapt, planner, expected_s = settings["adapt"], settings["planner"], settings["expected_downtime"]
    if expected_s is not None:
        check_number("Experiment.expected_downtime", expected_s, above=0)
        if adapt != "auto":
            raise SettingError("Experiment.expected_downtime", expected_s, "needs Experiment.adapt = 'auto'")
    if adapt == "reroute":
        return
    needs = {
        "several pipelines: with one, nobody has what a worker loses": settings["topology"].num_pipelines > 1,
        "a planner for failures": planner not in FAULT_FREE,
    }
    if adapt == "reassign":
        needs |= {"several stages: with one, all workers hold the same": settings["topology"].num_stages > 1}
    else:
        is_alike = chunks.is_uniform_cut and settings["microbatches"] is None
        is_one_run = not isinstance(planner, str) or planner not in SHAPES
        needs |= {
            "pipelines that are cut alike, and have equally many micro-batches; else use 'reassign'": is_alike,
            "a planner for one run of layers a stage; else use 'reassign'": is_one_run,
        }
    for what, is_so in needs.items():
        if not is_so:
            raise SettingError("Experiment.adapt", adapt, f"needs {what}")


def check_cuts(chunks: Chunks, planner: str | CustomPlanner) -> None:
    """Raises SettingError if pipelines are cut differently although the planner gives each stage several runs."""
    if isinstance(planner, str) and planner in SHAPES and not chunks.is_uniform_cut:
        allowed = "plans pipelines that are alike, and Experiment.cut differs between them"
        raise SettingError("Experiment.planner", planner, allowed)


def check_window(window: int, num_steps: int, eval_every: int, checkpoint: CheckpointConfig) -> None:
    """Raises SettingError if a window is longer than the run, or the interval of evaluations, saves or snapshots."""
    periods = {"Experiment.num_steps": num_steps, "Experiment.eval_every": eval_every}
    periods |= {f"CheckpointConfig.{name}": getattr(checkpoint, name) for name in ("every", "snapshot_every")}
    for name, period in periods.items():
        if 0 < period < window:
            allowed = f"must be at most {name} = {period}, or every window would be cut short"
            raise SettingError("Experiment.window", window, allowed)


def check_planner(planner: str | CustomPlanner, *, fails: bool) -> None:
    """Raises SettingError if the planner is unknown, or workers fail but it cannot plan for failures."""
    if isinstance(planner, str) and planner not in PLANNER_NAMES:
        raise SettingError("Experiment.planner", planner, f"choose one of {', '.join(PLANNER_NAMES)}")
    if fails and planner in FAULT_FREE:
        able = ", ".join(name for name in PLANNER_NAMES if name not in FAULT_FREE)
        allowed = f"plans without failures only, and Experiment.failures lists some; choose one of {able}"
        raise SettingError("Experiment.planner", planner, allowed)
