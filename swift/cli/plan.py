"""``swift plan``: plans a schedule for a topology with failures, and writes it as text, a picture or JSON.

Options can cut a model into stages, such as ``--blocks 61 --cut 16,15,15,15``, and distribute micro-batches among
pipelines, such as ``--microbatches 17,17,17,13``. With ``--adapt``, the text says what the survivors of a failure do,
what moves, and after what downtime the move pays for itself.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from swift.cli.values import PLAN, check_output, costs_of, seconds_of, workers_of
from swift.draw.text import counted, draw_chart, summarize
from swift.errors import SettingError, check_count, check_number, renamed_errors, renamed_settings, suggest
from swift.files import replace_file
from swift.schedules.adapt.choice import MODES, Adaptation, adapt, fault_free, rerouted
from swift.schedules.adapt.layouts import BlockProblem
from swift.schedules.planners.names import FAULT_FREE, shape_of
from swift.schedules.plans.normalize import num_plans, plans_to_prepare
from swift.schedules.plans.store import PlanStore, document
from swift.schedules.problem import COST_NAMES, Chunk, Costs, Problem, common_chunks, cut_by_costs
from swift.schedules.registry import PLANNERS, with_chunk_shape
from swift.schedules.schedule import Schedule
from swift.topology import Topology, Worker, worker_name
from swift.typed import SourceText

_FORMATS_BY_SUFFIX = {".svg": "svg", ".png": "svg", ".json": "json", ".txt": "text", "": "text"}
_OTHER_PICTURES = (".pdf", ".eps", ".ps", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".html")
_MAX_OPS = 3_000_000
"""Maximum number of operations in a plan; beyond it, planning and drawing take more than a few minutes."""
_MAX_CELLS = 20_000_000
"""Maximum of the window's ticks times workers; beyond it, their table takes more than a few gigabytes."""
_OPTIONS = {
    "Topology.num_pipelines": "--pipelines",
    "Topology.num_stages": "--stages",
    "Problem.num_microbatches": "--microbatches",
    "Problem.stage_of_chunk": "--cut",
    "Problem.num_iterations": "--iterations",
    "Problem.memory_limit": "--memory-limit",
    "Problem.failed": "--fail",
    "failed worker": "--fail",
    "failed workers": "--fail",
    "plan store": "--store",
    "solver": "--solver",
}
"""Maps the library's setting names to command-line options, for error messages."""


@dataclass(frozen=True)
class _BlockOptions:
    """The options that decide which blocks each stage holds.

    Attributes:
        num_blocks: ``--blocks``, or None for one chunk per stage, all of the same size.
        cuts: ``--cut`` as given, or None to cut by costs.
        embedding: ``--embedding``, time of the embedding's gradient, in units of a block.
        head: ``--head``, time of the head, in units of a block.
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
            shape: for each run of consecutive blocks, in model order, the stage that holds it.

        Raises:
            SettingError: there are fewer blocks than runs, a run has no block, or a cut does not add up to all blocks.
        """
        if self.num_blocks is None:
            for option, is_set in (("--cut", self.cuts), ("--embedding", self.embedding), ("--head", self.head)):
                if is_set:
                    raise SettingError(option, is_set, "needs --blocks, the number of blocks of the model")
            return (), ()
        for option, number in (("--embedding", self.embedding), ("--head", self.head)):
            check_number(option, number, least=0)
        sizes, runs = common_chunks(self._cuts(self.num_blocks, topology, failed, shape))
        holders = tuple(tuple(shape[run] for run in pipeline_runs) for pipeline_runs in runs)
        return self._sized(sizes, self.num_blocks, topology, costs), holders

    def blocks(self, topology: Topology, costs: Costs) -> tuple[Chunk, ...]:
        """Returns the costs of each block; without ``--blocks``, each stage counts as one block."""
        if self.num_blocks is None:
            return (Chunk(),) * topology.num_stages
        return self._sized((1,) * self.num_blocks, self.num_blocks, topology, costs)

    def _sized(self, sizes: Sequence[int], num_blocks: int, topology: Topology, costs: Costs) -> tuple[Chunk, ...]:
        """Returns chunks with ``sizes`` blocks each; the first also has the embedding's cost, the last the head's."""
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


def _microbatches_of(text: str) -> int | tuple[int, ...]:
    """Parses ``--microbatches``: one number for all pipelines, or one per pipeline.

    Raises:
        SettingError: the text is not a comma-separated list of whole numbers.
    """
    numbers = _numbers("--microbatches", text, "must be a whole number, or one for each pipeline, such as 17,17,17,13")
    return numbers[0] if len(numbers) == 1 else numbers


def _cut(text: str, num_blocks: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = _numbers("--cut", text, "must be numbers of blocks, such as 16,15,15,15")
    if len(sizes) != len(shape):
        parts_text = (
            f"{len(shape)} stages" if len(set(shape)) == len(shape) else f"{len(shape)} runs, of stages {shape}"
        )
        raise SettingError("--cut", text, f"must be one number of blocks for each of the {parts_text}")
    if sum(sizes) != num_blocks:
        raise SettingError("--cut", text, f"must sum to --blocks = {num_blocks}, not {sum(sizes)}")
    return sizes


def _numbers(option: str, text: str, allowed: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingError(option, text, allowed)
    return tuple(map(int, parts))


@dataclass(frozen=True, eq=False)
class AdaptedPlan:
    """The plan of ``--adapt``, with the facts to print about it.

    Attributes:
        plan: plan for the survivors.
        facts: entries of the JSON document, see ``_facts_of``.
        planning_ms: time to choose an adaptation and plan it, in milliseconds.
    """

    plan: Adaptation
    facts: Mapping[str, Any]
    planning_ms: float


def _check_adapt(options: argparse.Namespace) -> None:
    """Checks ``--adapt`` and the options that it requires or excludes.

    Raises:
        SettingError: the mode does not exist, a required option is missing, or an option cannot be combined with it.
    """
    if options.adapt is None:
        if options.downtime:
            raise SettingError("--downtime", options.downtime, "needs --adapt")
        return
    if options.adapt not in MODES:
        allowed = f"must be one of {', '.join(MODES)}"
        raise SettingError("--adapt", options.adapt, suggest(options.adapt, MODES, allowed))
    if not options.fail:
        raise SettingError("--adapt", options.adapt, "requires --fail, which lists the failed workers")
    if options.cut is not None and len(options.cut) > 1:
        allowed = "chooses the cut of each pipeline: give --cut once, as it is without a failure"
        raise SettingError("--adapt", options.adapt, allowed)
    if "," in options.microbatches:
        allowed = "chooses the micro-batches of each pipeline: give --microbatches once, as they are without a failure"
        raise SettingError("--adapt", options.adapt, allowed)
    for option, value in (("--store", options.store), ("--prepare", options.prepare)):
        if value is not None:
            raise SettingError("--adapt", options.adapt, f"cannot go together with {option}, which is for re-routing")
    if options.solver not in ("adaptive", "lockstep", "v"):
        allowed = f"plans with --solver adaptive, lockstep or v, not {options.solver}"
        raise SettingError("--adapt", options.adapt, allowed)
    for option, number in (("--block-bytes", options.block_bytes), ("--bandwidth", options.bandwidth)):
        check_number(option, number, above=0)


def _block_problem(options: argparse.Namespace, problem: Problem) -> BlockProblem:
    """Returns a planning problem's failure-free version in terms of blocks, for ``adapt``."""
    topology = Topology(options.pipelines, options.stages)
    cut = _BlockOptions(options.blocks, options.cut, options.embedding, options.head)
    problem, number = replace(problem, failed=frozenset()), problem.num_chunks
    if options.blocks is None:
        return BlockProblem.of_stages(problem)
    sizes = tuple(chunk.num_blocks for chunk in problem.chunks) or (options.blocks // number,) * number
    return BlockProblem(problem, cut.blocks(topology, costs_of(options.costs)), sizes)


def adapted(options: argparse.Namespace, problem: Problem) -> AdaptedPlan:
    """Plans for the survivors as ``--adapt`` requests, and collects the facts to print."""
    work, failed = _block_problem(options, problem), problem.failed
    downtime_s = seconds_of("--downtime", options.downtime) if options.downtime else math.inf
    started = time.perf_counter()
    plan = adapt(
        work,
        failed,
        options.adapt,
        downtime_s=downtime_s,
        block_bytes=options.block_bytes,
        bandwidth=options.bandwidth,
        in_lockstep=options.solver == "lockstep",
    )
    planning_ms = 1e3 * (time.perf_counter() - started)
    stayed = plan if plan.mode == "reroute" else rerouted(work, failed, in_lockstep=plan.in_lockstep)
    seconds = plan.relocation.seconds(options.block_bytes, options.bandwidth)
    return AdaptedPlan(plan, _facts_of(plan, stayed, seconds, options.block_bytes), planning_ms)


def _facts_of(plan: Adaptation, stayed: Adaptation, move_s: float, block_bytes: float) -> dict[str, Any]:
    """Returns the entries of the JSON document that describe a plan.

    - ``adapt``: the chosen mode.
    - ``blocks_of_worker``: (first block, end) of each worker (with ``--solver v``, a pair for each run); null for an
      idle worker.
    - ``position_of_worker``: the new position of each worker that takes another's place.
    - ``microbatches_of_pipeline``: number of micro-batches of each pipeline.
    - ``throughput``, ``reroute_throughput``, ``ideal_throughput``: relative to the zero-bubble plan without a failure.
      With ``--solver lockstep`` that reference is also in lockstep; with ``--solver v`` it is planned by ``v``.
    - ``moved_bytes``, ``move_s``: size of the move in bytes, and its duration in seconds.
    - ``pays_after_s``: downtime in seconds after which the move pays for itself; null if it never does.
    """
    without = fault_free(plan.work, in_lockstep=plan.in_lockstep).period
    return {
        "adapt": plan.mode,
        "blocks_of_worker": {
            worker_name(worker): _blocks(runs, in_v=plan.work.in_v) for worker, runs in plan.blocks_of_worker.items()
        },
        "position_of_worker": {
            worker_name(worker): worker_name(place)
            for worker, place in plan.relocation.place_of.items()
            if worker != place
        },
        "microbatches_of_pipeline": list(plan.schedule.problem.microbatches),
        "throughput": without / plan.period,
        "reroute_throughput": without / stayed.period,
        "ideal_throughput": plan.ideal_throughput,
        "moved_bytes": plan.relocation.moved_blocks * block_bytes,
        "move_s": move_s,
        "pays_after_s": plan.pays_after_s(stayed, move_s),
    }


def _adapted_lines(adapted: AdaptedPlan) -> Iterator[str]:
    """Yields lines of text that describe an adapted plan."""
    facts = adapted.facts
    what = {
        "reroute": "re-routing, nothing moves",
        "reassign": "workers take failed ones' places",
        "recut": "pipelines cut anew",
    }
    numbers = ", ".join(map(str, facts["microbatches_of_pipeline"]))
    yield f"adapted by {facts['adapt']}: {what[facts['adapt']]}; micro-batches of the pipelines: {numbers}"
    yield (
        f"throughput       {_percent(facts['throughput']):<10} of the zero-bubble plan's without a failure; "
        f"re-routing {_percent(facts['reroute_throughput'])}, live workers {_percent(facts['ideal_throughput'])}"
    )
    for worker, place in facts["position_of_worker"].items():
        yield f"  worker {worker} takes the place {place}"
    moved = f"{facts['moved_bytes'] / 1e9:.3g} GB move in {facts['move_s']:.3g} s"
    if not facts["moved_bytes"]:
        return
    pays = facts["pays_after_s"]
    yield f"{moved}, which " + (
        "never pays" if pays is None else f"pays in a downtime of more than {pays:.3g} s, the way back counted"
    )


def _blocks(runs: Sequence[tuple[int, int]], *, in_v: bool) -> list[Any] | None:
    """Returns a worker's (first block, end), in a V schedule a pair for each run, or None if it has no block."""
    if not runs:
        return None
    return [list(run) for run in runs] if in_v else list(runs[0])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plan(options: argparse.Namespace) -> None:
    """Runs ``swift plan --pipelines D --stages P --microbatches M``."""
    form = _format(options)
    with renamed_errors(lambda error: _translate(error, options)):
        _check_adapt(options)
        problem = _problem(options)
        planner, store = _Timed(_planner(options)), _store(options)
        adaptation = None if options.adapt is None else adapted(options, problem)
        if adaptation is not None:
            schedule, planning_ms = adaptation.plan.schedule, adaptation.planning_ms
        else:
            schedule = planner(problem) if store is None else store.plan(problem, options.solver, planner)
            planning_ms = planner.elapsed_ms
        num_new = _prepare(options, problem, store)
        if options.prepare is not None and len(problem.failed) <= options.prepare:
            num_new += planner.num_calls
        plans = _plans(options, problem, num_new)
        if form in ("svg", "trace"):
            content = _drawn(form, schedule, options.out)
            if options.prepare is not None:
                print(plans, file=sys.stderr)
        else:
            facts = document(schedule, planning_ms, with_ops=options.ops)
            if options.prepare is not None:
                facts["num_plans"] = num_plans(problem.topology, options.prepare)
            lines = [*summarize(schedule.problem, facts), "", *([plans, ""] if plans else [])]
            if adaptation is not None:
                facts |= adaptation.facts
                lines = [*_adapted_lines(adaptation), "", *lines]
            content = json.dumps(facts) + "\n" if form == "json" else _text(schedule, lines, options.out)
    _write(options.out, content)


@dataclass
class _Timed:
    """Wraps a planner to measure its total time, count its calls, and print each of its warnings as one line."""

    planner: Callable[[Problem], Schedule]
    elapsed_ms: float = 0.0
    num_calls: int = 0

    def __call__(self, problem: Problem) -> Schedule:
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            schedule = self.planner(problem)
        self.elapsed_ms += 1e3 * (time.perf_counter() - started)
        self.num_calls += 1
        for warning in caught:
            print(f"swift: {warning.message}", file=sys.stderr)
        return schedule


def _problem(options: argparse.Namespace) -> Problem:
    topology, failed = Topology(options.pipelines, options.stages), workers_of("--fail", options.fail)
    microbatches, costs = _microbatches_of(options.microbatches), costs_of(options.costs)
    cut = _BlockOptions(options.blocks, options.cut, options.embedding, options.head)
    shape = shape_of(options.solver, topology.num_stages)
    chunks, holders = cut.chunks(topology, failed, costs, shape)
    most = microbatches if isinstance(microbatches, int) else max(microbatches)
    num_parts = max(len(shape), len(chunks), options.blocks or 0 if options.adapt else 0)
    num_ops = 3 * options.pipelines * num_parts * most * options.iterations
    # Upper bound on the ticks: a worker runs its own operations, and the pipeline fills and drains once.
    num_cells = options.pipelines * options.stages * 3 * (most * options.iterations + num_parts)
    if num_ops > _MAX_OPS or num_cells > _MAX_CELLS:
        size = f"{options.pipelines} x {options.stages} x {options.microbatches} x {options.iterations}"
        allowed = f"makes {num_ops:,} ops in the window; at most {_MAX_OPS:,} can be planned"
        if num_ops <= _MAX_OPS:
            allowed = f"makes about {num_cells:,} ticks of workers; at most {_MAX_CELLS:,} can be planned"
        raise SettingError("--pipelines x --stages x --microbatches x --iterations", SourceText(size), allowed)
    problem = Problem(
        topology,
        microbatches,
        failed,
        costs,
        num_iterations=options.iterations,
        decoupled=not options.no_decouple,
        staggered=not options.no_stagger,
        chunks=chunks,
        stage_of_chunk=holders,
    )
    if options.memory_limit == math.inf:
        raise SettingError("--memory-limit", options.memory_limit, "is not a limit: leave the option out for none")
    with renamed_settings({"Problem.memory_limit": "--memory-limit"}):
        return (problem if chunks else with_chunk_shape(options.solver, problem)).limited(options.memory_limit)


def _planner(options: argparse.Namespace) -> Callable[[Problem], Schedule]:
    if options.solver not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise SettingError("--solver", options.solver, suggest(options.solver, PLANNERS, f"must be one of {known}"))
    return PLANNERS[options.solver]


def _store(options: argparse.Namespace) -> PlanStore | None:
    if options.store is None:
        return None
    if options.solver in FAULT_FREE:
        allowed = f"keeps plans for failures, which {options.solver} does not make: try adaptive"
        raise SettingError("--store", str(options.store), allowed)
    return PlanStore(options.store, warn=lambda line: print(f"swift: {line}", file=sys.stderr))


def _prepare(options: argparse.Namespace, problem: Problem, store: PlanStore | None) -> int:
    """Plans all configurations with up to ``--prepare`` failures that are not yet in the store, and stores them.

    Returns:
        The number of new plans.
    """
    if options.prepare is not None and not problem.is_uniform:
        raise SettingError("--prepare", options.prepare, "needs pipelines with the same cut and as many micro-batches")
    if store is None or options.prepare is None:
        return 0
    total, num_new, shown = num_plans(problem.topology, options.prepare), 0, 0
    for number, prepared in enumerate(plans_to_prepare(problem, options.prepare), start=1):
        planner = _Timed(PLANNERS[options.solver])
        store.plan(prepared, options.solver, planner)
        num_new += planner.num_calls
        # On a terminal the line is overwritten in place; Ctrl-C needs no cleanup.
        if sys.stderr.isatty():
            print(f"\rprepared {number:,}/{total:,} plans", end="\n" if number == total else "", file=sys.stderr)
        elif number * 10 // total > shown or number == 1:
            shown = number * 10 // total
            print(f"prepared {number:,}/{total:,} plans", file=sys.stderr)
    return num_new


def _plans(options: argparse.Namespace, problem: Problem, num_new: int) -> str:
    if not problem.is_uniform:
        return ""
    most = max(1, len(problem.failed)) if options.prepare is None else options.prepare
    count, moved = (num_plans(problem.topology, most, move_roles=move) for move in (False, True))
    line = f"plans to prepare for up to {counted(most, 'failure')}: {count:,} ({moved:,} if roles may be moved)"
    if options.prepare is not None and options.store is not None:
        line += f"; all are in {options.store}, {num_new:,} of them new"
    return line


def _format(options: argparse.Namespace) -> str:
    """Returns the output format, which the suffix of ``--out`` may imply; checks the output options before planning."""
    out, form = options.out, options.format
    suffix = out.suffix.lower() if out else ""
    if suffix in _OTHER_PICTURES or (form is None and suffix not in _FORMATS_BY_SUFFIX and not _is_special(out)):
        raise SettingError("--out", str(out), "must end in .svg, .png, .json or .txt, or --format says what it holds")
    if form is None:
        form = _FORMATS_BY_SUFFIX.get(suffix, "text")
    if out is not None:
        check_output("--out", out, PLAN)
    if suffix in (".png", ".svg") and form != "svg":
        raise SettingError("--out", str(out), f"such a file holds a picture, not --format {form}")
    if options.ops and form != "json":
        raise SettingError("--ops", SourceText("(set)"), f"needs --format json, not {form}")
    if options.prepare is not None:
        check_count("--prepare", options.prepare, least=0)
    return form


def _is_special(path: Path | None) -> bool:
    """Returns whether a path exists and is not a regular file, such as a pipe or ``/dev/null``."""
    return path is not None and path.exists() and not path.is_file()


def _drawn(form: str, schedule: Schedule, out: Path | None) -> bytes | str:
    # Matplotlib is imported only if there is a picture to draw.
    if form == "trace":
        from swift.draw.trace import trace_json

        return "".join(trace_json(schedule))
    from swift.draw.picture import picture_file

    return picture_file(schedule, "png" if out and out.suffix.lower() == ".png" else "svg")


def _text(schedule: Schedule, lines: Sequence[str], out: Path | None) -> str:
    """Returns the plan as text: in color on a terminal, without color in a file."""
    console = Console(highlight=False, force_terminal=None if out is None else False)
    chart = draw_chart(schedule, console.width, ascii_only=out is None and console.options.ascii_only)
    # Captured and written later, since rich would exit the process if a pipe is closed.
    with console.capture() as captured:
        for line in (*lines, chart):
            console.print(line, soft_wrap=True, markup=False)
    return captured.get()


def _write(out: Path | None, content: bytes | str) -> None:
    if out is None:
        sys.stdout.write(content if isinstance(content, str) else content.decode())
        sys.stdout.flush()
        return
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_special(out):  # a pipe or device must be written to, not replaced by a file
            out.write_bytes(data)
        else:
            replace_file(out, data)
    except OSError as error:
        raise SettingError("--out", str(out), f"cannot be written: {error.strerror}") from error


def _translate(error: SettingError, options: argparse.Namespace) -> SettingError:
    setting, value, allowed = error.setting, error.value, error.allowed
    if setting.startswith("Costs."):
        (name,) = (name for name, field in COST_NAMES.items() if setting == f"Costs.{field}")
        return SettingError("--costs", SourceText(f"{name}={value:g}"), allowed)
    if setting in ("failed workers", "Problem.failed"):
        value = " ".join(options.fail)
    if setting == "Problem.num_microbatches" and isinstance(value, tuple):
        value = options.microbatches
    if setting == "Problem.stage_of_chunk":
        value = " ".join(options.cut or ())
    if setting == "Problem.memory_limit":
        value, stash = options.memory_limit, costs_of(options.costs).f_stash
        allowed += "" if stash == 1 else f" (in the unit of --costs: an F-stash is {stash:g})"
    return SettingError(_OPTIONS.get(setting, setting), value, allowed)
