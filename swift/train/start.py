"""The start of a run: its options, its directory, the state to continue from, and the iterations left to do.

An invocation acquires the run directory, then finds the newest checkpoint or the initial weights. A run that cannot be
continued is refused before data are loaded or anything is written.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.checkpoint.manifest import Manifest, clean_up_saves, committed_steps
from swift.checkpoint.reader import RestorePlan, plan_restore
from swift.config.cuts import checkpoint_cut
from swift.config.experiment import Experiment
from swift.config.stored import defaults_in, write_config
from swift.data.corpus import PlanReading, plain_reading
from swift.data.remote_records import ConnectHosts
from swift.deadlines import Deadlines
from swift.errors import SettingError, check_count
from swift.experts.optimizer import learning_rate
from swift.models.parameters import root_key
from swift.pipeline.reconfigure.engine import Prepare
from swift.pipeline.state import TrainState
from swift.pipeline.step.spec import StepSpec
from swift.runlog.lease import Lease, acquire_lease, remove_lease, this_process
from swift.runlog.observers import Observer
from swift.runlog.reading import SUMMARY, changed_settings, check_is_run, check_new_run, check_same_run
from swift.runlog.run_directory import RunDirectory
from swift.signals import cleaning_up
from swift.train.build import with_num_ranks
from swift.train.display import Series
from swift.train.hosts import SINGLE_HOST, Hosts, checked_by_all
from swift.train.initial_weights import ModelPlan, WeightSource
from swift.train.loop import window_length
from swift.train.records import Validations, summarize
from swift.train.saved_state import import_fallback, load_state, put_state


@dataclass(frozen=True)
class TrainOptions:
    """Options for one invocation of a run, besides the experiment's settings.

    Attributes:
        run_dir: run directory.
        config_text: operative configuration, stored in the run directory; if empty, it is generated from the
            experiment by ``swift.config.stored.config_text``.
        resume: whether to continue the run in the directory.
        stop_at: iteration after which to stop early, with a checkpoint; None to run to the end.
        profile: (first, last) iteration to trace with the profiler; None for no trace.
        prepare: which reconfigurations to prepare; ``next`` plans and compiles ahead for the failure or return of any
            one worker.
        stopping_s: seconds that the process may take to save a checkpoint and exit after Ctrl-C or SIGTERM.
        ends_at_second: whether a second Ctrl-C or SIGTERM ends the process before it has saved.
        init_from: run or model whose weights a new run begins with; None to initialize them randomly with
            ``Experiment.seed``.
        log_every: iterations between progress lines; None for about ten lines in total, and none on a terminal.
        observers: observers of the run besides TensorBoard.
        series: position of the run in a series of runs; None for a single run.
        corpora: directory of corpus indexes, see ``find_index``; None to read and tokenize the corpus again.
        connect: function that connects to input hosts while the corpus index is built; None for no input hosts.
        plan: function that plans how the corpus is read while its index is built.
        hosts: hosts of the run.
    """

    run_dir: Path
    config_text: str = ""
    resume: bool = False
    stop_at: int | None = None
    profile: tuple[int, int] | None = None
    prepare: Prepare = "next"
    stopping_s: float = Deadlines.stopping
    ends_at_second: bool = True
    init_from: WeightSource | None = None
    log_every: int | None = None
    observers: tuple[Observer, ...] = ()
    series: Series | None = None
    corpora: Path | None = None
    connect: ConnectHosts | None = None
    plan: PlanReading = plain_reading
    hosts: Hosts = SINGLE_HOST


_MAY_CHANGE = (
    *(f"Experiment.{n}" for n in ("num_steps", "eval_every", "num_eval_batches", "patience", "min_improvement")),
    "Experiment.attention",
    *(f"CheckpointConfig.{n}" for n in ("every", "num_kept", "num_best")),
    *(f"CheckpointConfig.{n}" for n in ("experts_per_layer", "selection", "plt_budget")),
    *(f"CheckpointConfig.{n}" for n in ("snapshot_every", "snapshot_experts_per_layer")),
    *(f"Experiment.{n}" for n in ("failures", "adapt", "expected_downtime", "planner", "window", "memory_limit")),
    *(f"Experiment.{n}" for n in ("remat", "cut")),
    *(f"OptimizerConfig.{n}" for n in ("peak_learning_rate", "final_learning_rate", "warmup_steps", "decay_steps")),
    "OptimizerConfig.clip_norm",
    *(f"Topology.{n}" for n in ("num_pipelines", "num_stages", "num_expert_ranks")),
    *("Experiment.topology", "Experiment.ranks", "Experiment.num_microbatches", "Experiment.microbatches"),
    *("Experiment.embedding", "Experiment.head", "OptimizerConfig.memory"),
    *("Experiment.sequences_per_microbatch", "ExpertConfig.slots_per_rank"),
)
"""Settings that may change when a run is resumed.

They control the run's length, its records and failures, the devices and methods that compute the same sums, the number
of sequences in an iteration, and remedies for a loss that was not finite.
"""
_BATCH_SETTINGS = tuple(f"Experiment.{n}" for n in ("num_microbatches", "microbatches", "sequences_per_microbatch"))
_PIPELINES = "Topology.num_pipelines"


@contextmanager
def acquire_run(options: TrainOptions) -> Iterator[Lease]:
    """Acquires the run directory for this process while the block runs; call it before reading anything there.

    A directory that this call created is removed again if it is still empty at the end.

    Yields:
        The lease on the directory.

    Raises:
        SettingError: another process owns the directory, or the directory is unsuitable: not a run when resuming, or
            not new otherwise.
    """
    run_dir = options.run_dir
    if options.log_every is not None:
        check_count("--log-every", options.log_every, least=1)
    if options.resume and options.init_from is not None:
        allowed = "is for a new run; --resume continues from the run's own checkpoint"
        raise SettingError("--init-from", str(options.init_from.run_dir), allowed)
    if options.resume:
        check_is_run(run_dir, "--run-dir")
    else:
        check_new_run(run_dir)
    owner = this_process()
    with made_directory(run_dir) as remove_empty:

        def leave() -> None:
            remove_lease(run_dir, owner)
            remove_empty()

        with cleaning_up(leave), acquire_lease(run_dir, owner, report=_tell) as lease:
            yield lease


@contextmanager
def made_directory(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Creates a run directory and its parents if missing; removes those that are still empty after the block.

    Yields:
        A function that removes them, for a caller that has to do so earlier.

    Raises:
        SettingError: the directory cannot be created.
    """
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]

    def remove_empty() -> None:
        for path in missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()

    try:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError("--run-dir", str(run_dir), f"cannot be made a directory: {error.strerror}") from error
        yield remove_empty
    finally:
        remove_empty()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def try_own_rules(experiment: Experiment, num_ranks: int | None = None) -> None:
    """Tries out a user's placement policy and router before a run; Swift's own are skipped.

    Args:
        experiment: settings of the run.
        num_ranks: number of expert ranks to place experts on; None to use the experiment's number.

    Raises:
        SettingError: the policy or router fails its trial.
    """
    experiment = with_num_ranks(experiment, num_ranks or experiment.topology.num_expert_ranks)
    num_layers, experts = checkpoint_cut(experiment).stack_size(True), experiment.experts
    if not num_layers:
        return
    if not _is_swifts(experts.router):
        from swift.experts.router_trial import check_router

        sizes = experts.num_classes, experts.top_k, experiment.model.model_dim
        check_router(experts.router, *sizes, setting="ExpertConfig.router")
    if not _is_swifts(experiment.placement):
        from swift.experts.placement.trial import check_policy

        check_policy(
            experiment.placement,
            num_layers,
            experiment.experts.num_classes,
            experiment.topology.num_expert_ranks,
            experiment.experts.slots_per_rank,
            num_tokens=experiment.tokens_per_step * experiment.experts.top_k,
            setting="Experiment.placement",
        )


def _is_swifts(rule: object) -> bool:
    return type(rule).__module__.startswith("swift.")


def check_resumable(experiment: Experiment, options: TrainOptions) -> None:
    """Raises SettingError if the run in the directory has other settings, except for those in ``_MAY_CHANGE``.

    Other pipelines must come with other micro-batches, so that nobody changes the batch without meaning to.
    """
    check_same_run(options.run_dir, options.config_text, _MAY_CHANGE, set(defaults_in(experiment)))
    changed = changed_settings(options.run_dir, options.config_text)
    if _PIPELINES in changed and not changed.keys() & set(_BATCH_SETTINGS):
        each, count = experiment.num_microbatches, experiment.topology.num_pipelines
        allowed = (
            "would change the sequences of an iteration: set Experiment.num_microbatches to keep them, or "
            f"Experiment.microbatches = {(each,) * count} to change them"
        )
        raise SettingError(_PIPELINES, count, allowed)


def find_start(experiment: Experiment, options: TrainOptions) -> RestorePlan | None:
    """Finds the newest intact checkpoint to continue from, or returns None for a new run.

    With several hosts, each verifies a part of the files, and the first host chooses the checkpoint.

    Raises:
        SettingError: the directory is unsuitable, or its run has no intact checkpoint.
        RunError: a fallback checkpoint cannot be moved back to the directory.
    """
    directory, hosts, start = options.run_dir / "checkpoints", options.hosts, None
    with hosts.all_or_none():
        if hosts.is_first:
            _check_start(experiment, options, directory)
    if not options.resume:
        return None
    checker = checked_by_all(directory, hosts)
    with hosts.all_or_none():
        if hosts.is_first:
            start = plan_restore(directory, experiment.identity(), checker=checker)
    step = hosts.broadcast(None if start is None else start.step)
    with hosts.all_or_none():
        return start or plan_restore(directory, experiment.identity(), step, checker)  # the first host's choice


def _check_start(experiment: Experiment, options: TrainOptions, directory: Path) -> None:
    """Checks that the run can begin or resume here; cleans up interrupted saves and imports fallback checkpoints."""
    if not options.resume:
        check_new_run(options.run_dir)
        return
    check_resumable(experiment, options)
    clean_up_saves(directory)
    for line in import_fallback(directory):
        print(line, file=sys.stderr)
    if not committed_steps(directory):
        allowed = "holds no checkpoint to resume from; start again in another --run-dir"
        raise SettingError("--resume", str(options.run_dir), allowed)


def stopped_early(experiment: Experiment, newest: Manifest | None) -> Validations | None:
    """Returns the validations for which a run stopped before its last iteration; None if it is to go on."""
    if newest is None:
        return None
    validations = Validations.restored(newest.extra, experiment.min_improvement, experiment.tokens_per_evaluation)
    return validations if validations.ends_early(experiment) else None


def needs_summary(experiment: Experiment, options: TrainOptions, done: int, stopped: Validations | None = None) -> bool:
    """Whether all iterations are done and saved, or the run stopped early, and only the summary is missing."""
    is_over = done == experiment.num_steps or stopped is not None
    return options.resume and is_over and not (options.run_dir / SUMMARY).exists()


def write_summary(
    experiment: Experiment,
    options: TrainOptions,
    lease: Lease,
    device: str,
    done: int,
    stopped: Validations | None = None,
) -> dict[str, Any]:
    """Writes and returns the summary of a run whose iterations are all done, or that stopped early."""
    with open_run(experiment, options, done, lease) as directory:
        directory.log_event("finish", done)
        return summarize(experiment, directory, device, stopped)


def check_range(
    experiment: Experiment, options: TrainOptions, done: int, last_step: int, stopped: Validations | None = None
) -> None:
    """Raises SettingError if no iterations are left, or an option refers to iterations outside the remaining ones."""
    if stopped is not None:
        allowed = f"stops early at iteration {done}: {stopped.reason}; change Experiment.patience to go on"
        raise SettingError("--resume", str(options.run_dir), allowed)
    if done >= experiment.num_steps:
        allowed = f"has nothing left to do: it is at iteration {done}; set Experiment.num_steps above that to extend it"
        raise SettingError("--resume", str(options.run_dir), allowed)
    if not done < last_step <= experiment.num_steps:
        allowed = f"must be from {done + 1}, the next iteration, to Experiment.num_steps = {experiment.num_steps}"
        raise SettingError("--stop-at", last_step, allowed)
    if options.profile and not done < options.profile[0] <= options.profile[1] <= last_step:
        first, last = options.profile
        raise SettingError("--profile", f"{first}:{last}", f"must lie within iterations {done + 1}:{last_step}")


def find_weights(experiment: Experiment, options: TrainOptions) -> RestorePlan | ModelPlan | None:
    """Finds the weights of ``options.init_from`` for a new run; returns None if the run initializes its own."""
    return None if options.init_from is None else options.init_from.plan(experiment)


def read_start(
    spec: StepSpec, options: TrainOptions, start: RestorePlan | None, weights: RestorePlan | ModelPlan | None
) -> TrainState | dict[str, Any] | None:
    """Reads the first state, or the initial weights, into host memory; returns None if the run initializes its own.

    On several hosts, each host reads what it needs itself.

    Args:
        spec: spec of the run's step.
        options: options of this invocation.
        start: checkpoint of the run itself; None for a new run.
        weights: result of ``find_weights``.
    """
    if start is not None:
        return load_state(options.run_dir / "checkpoints", start, spec)
    return None if options.init_from is None or weights is None else options.init_from.parameters(weights)


def begin(experiment: Experiment, spec: StepSpec, read: TrainState | dict[str, Any] | None) -> TrainState:
    """Creates the run's first state on all hosts' devices, from the result of ``read_start``."""
    if read is None:
        return spec.init(root_key(experiment.seed))
    return put_state(spec, read) if isinstance(read, TrainState) else spec.state_from_params(read)


def open_run(experiment: Experiment, options: TrainOptions, done: int, lease: Lease) -> RunDirectory:
    """Creates or reopens the run directory, which may be written to while the lease is held."""
    lease.check()
    changed = changed_settings(options.run_dir, options.config_text) if options.resume else {}
    observers: Any = *options.observers, *experiment.observers
    try:
        write_config(options.run_dir, experiment)
    except OSError as error:
        allowed = f"cannot be written to: {error.strerror}"
        raise SettingError("--run-dir", str(options.run_dir), allowed) from error
    if options.resume:
        may_lack = set(defaults_in(experiment))
        directory = RunDirectory.resume(options.run_dir, options.config_text, done, _MAY_CHANGE, may_lack, observers)
        _announce_changes(experiment, directory, done, changed)
    else:
        directory = RunDirectory.create(options.run_dir, options.config_text, observers)
    directory.check = lease.check
    return directory


def _announce_changes(
    experiment: Experiment, directory: RunDirectory, done: int, changed: Mapping[str, tuple[str | None, str | None]]
) -> None:
    """Records and prints the changed settings of a resumed run, and the learning rate that results."""
    newer = set(defaults_in(experiment))  # a setting that did not exist when the run began has not changed
    values = {
        name: [text and text.partition("=")[2].strip() for text in (before, now)]
        for name, (before, now) in changed.items()
        if before is not None or name not in newer
    }
    if not values or done >= experiment.num_steps:
        return
    rate = float(learning_rate(experiment.optimizer, experiment.num_steps)(done))
    directory.log_event("settings_changed", done, changed=values, learning_rate=rate)
    for name, (before, now) in values.items():
        print(f"resumed with {name} = {now} (before: {before or 'not a setting'})", file=sys.stderr)
    if any(name == "Experiment.num_steps" or name.startswith("OptimizerConfig.") for name in values):
        optimizer = experiment.optimizer
        end = f"a cosine that ends at iteration {optimizer.decay_steps or experiment.num_steps}"
        where = end if optimizer.schedule is None else repr(optimizer.schedule)
        print(f"the learning rate of iteration {done + 1} is {rate:.3g}, on {where}", file=sys.stderr)


def next_length(experiment: Experiment, options: TrainOptions, done: int, last_step: int) -> int:
    """Returns how many iterations run next as one program, see ``window_length``."""
    first, last = options.profile or (0, 0)
    periods = (experiment.eval_every, experiment.checkpoint.every, experiment.checkpoint.snapshot_every)
    return window_length(experiment.window, done, last_step, periods, breaks=(first - 1, last))
