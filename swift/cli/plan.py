"""``swift plan``: a schedule of a topology with its failures, described, drawn, or written for a program."""

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from swift.cli.options.adapting import adapted, adapted_lines, check_adapt
from swift.cli.options.cuts import BlockOptions, microbatches_of
from swift.cli.options.kinds import Written
from swift.cli.options.mistakes import nearest, translated
from swift.cli.options.named import costs_of, workers_of
from swift.cli.options.outputs import PLAN, check_output
from swift.errors import SettingError, check_count, renamed_settings
from swift.files import replace_file
from swift.schedules.planners.registry import PLANNERS, in_shape, shape_of
from swift.schedules.plans.json_format import COST_NAMES, document
from swift.schedules.plans.normalize import num_plans, plans_to_prepare
from swift.schedules.plans.store import PlanStore
from swift.schedules.problem import Problem
from swift.schedules.schedule import Schedule
from swift.tools.draw.rows import counted
from swift.tools.draw.summary import summarize
from swift.tools.draw.text import draw_chart
from swift.topology import Topology

FORMATS_BY_SUFFIX = {".svg": "svg", ".png": "svg", ".json": "json", ".txt": "text", "": "text"}
_OTHER_PICTURES = (".pdf", ".eps", ".ps", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".html")
FAULT_FREE = ("gpipe", "one_f_one_b", "zero_bubble")
MAX_OPS = 3_000_000
"""Operations beyond which a plan, its ticks and its picture take more than a few minutes."""
MAX_CELLS = 20_000_000
"""Ticks of the window times workers beyond which their table takes more than a few gigabytes."""
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
"""Options of the command line by the library's names of settings."""


def plan(options: argparse.Namespace) -> None:
    """``swift plan --pipelines D --stages P --microbatches M``."""
    form = _format(options)
    with translated(lambda error: _translate(error, options)):
        check_adapt(options)
        problem = _problem(options)
        planner, store = _Timed(_planner(options)), _store(options)
        found = None if options.adapt is None else adapted(options, problem)
        if found is not None:
            schedule, planning_ms = found.plan.schedule, found.planning_ms
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
            if found is not None:
                facts |= found.facts
                lines = [*adapted_lines(found), "", *lines]
            content = json.dumps(facts) + "\n" if form == "json" else _text(schedule, lines, options.out)
    _write(options.out, content)


@dataclass
class _Timed:
    """Wraps a planner to note its time, and to print each of its warnings in a line."""

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
    microbatches, costs = microbatches_of(options.microbatches), costs_of(options.costs)
    cut = BlockOptions(options.blocks, options.cut, options.embedding, options.head)
    shape = shape_of(options.solver, topology.num_stages)
    chunks, holders = cut.chunks(topology, failed, costs, shape)
    most = microbatches if isinstance(microbatches, int) else max(microbatches)
    num_parts = max(len(shape), len(chunks), options.blocks or 0 if options.adapt else 0)
    num_ops = 3 * options.pipelines * num_parts * most * options.iterations
    # The pipeline fills and drains once, and a worker has to run its own ops.
    num_cells = options.pipelines * options.stages * 3 * (most * options.iterations + num_parts)
    if num_ops > MAX_OPS or num_cells > MAX_CELLS:
        size = f"{options.pipelines} x {options.stages} x {options.microbatches} x {options.iterations}"
        allowed = f"makes {num_ops:,} ops in the window; at most {MAX_OPS:,} can be planned"
        if num_ops <= MAX_OPS:
            allowed = f"makes about {num_cells:,} ticks of workers; at most {MAX_CELLS:,} can be planned"
        raise SettingError("--pipelines x --stages x --microbatches x --iterations", Written(size), allowed)
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
        return (problem if chunks else in_shape(options.solver, problem)).limited(options.memory_limit)


def _planner(options: argparse.Namespace) -> Callable[[Problem], Schedule]:
    if options.solver not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise SettingError("--solver", options.solver, nearest(options.solver, PLANNERS, f"must be one of {known}"))
    return PLANNERS[options.solver]


def _store(options: argparse.Namespace) -> PlanStore | None:
    if options.store is None:
        return None
    if options.solver in FAULT_FREE:
        allowed = f"keeps plans for failures, which {options.solver} does not make: try adaptive"
        raise SettingError("--store", str(options.store), allowed)
    return PlanStore(options.store, warn=lambda line: print(f"swift: {line}", file=sys.stderr))


def _prepare(options: argparse.Namespace, problem: Problem, store: PlanStore | None) -> int:
    """Plans and stores all configurations of up to so many failures, except for those stored already.

    Returns:
        Number of new plans.
    """
    if options.prepare is not None and not problem.is_alike:
        raise SettingError("--prepare", options.prepare, "needs pipelines with the same cut and as many micro-batches")
    if store is None or options.prepare is None:
        return 0
    total, num_new, shown = num_plans(problem.topology, options.prepare), 0, 0
    for number, prepared in enumerate(plans_to_prepare(problem, options.prepare), start=1):
        planner = _Timed(PLANNERS[options.solver])
        store.plan(prepared, options.solver, planner)
        num_new += planner.num_calls
        # On a terminal the line is overwritten; Ctrl-C at any time leaves nothing to restore.
        if sys.stderr.isatty():
            print(f"\rprepared {number:,}/{total:,} plans", end="\n" if number == total else "", file=sys.stderr)
        elif number * 10 // total > shown or number == 1:
            shown = number * 10 // total
            print(f"prepared {number:,}/{total:,} plans", file=sys.stderr)
    return num_new


def _plans(options: argparse.Namespace, problem: Problem, num_new: int) -> str:
    if not problem.is_alike:
        return ""
    most = max(1, len(problem.failed)) if options.prepare is None else options.prepare
    count, moved = (num_plans(problem.topology, most, move_roles=move) for move in (False, True))
    line = f"plans to prepare for up to {counted(most, 'failure')}: {count:,} ({moved:,} if roles may be moved)"
    if options.prepare is not None and options.store is not None:
        line += f"; all are in {options.store}, {num_new:,} of them new"
    return line


def _format(options: argparse.Namespace) -> str:
    """Returns the format, which --out may imply; its mistakes are reported before the planner takes its time."""
    out, form = options.out, options.format
    suffix = out.suffix.lower() if out else ""
    if suffix in _OTHER_PICTURES or (form is None and suffix not in FORMATS_BY_SUFFIX and not _is_special(out)):
        raise SettingError("--out", str(out), "must end in .svg, .png, .json or .txt, or --format says what it holds")
    if form is None:
        form = FORMATS_BY_SUFFIX.get(suffix, "text")
    if out is not None:
        check_output("--out", out, PLAN)
    if suffix in (".png", ".svg") and form != "svg":
        raise SettingError("--out", str(out), f"such a file holds a picture, not --format {form}")
    if options.ops and form != "json":
        raise SettingError("--ops", Written("(set)"), f"needs --format json, not {form}")
    if options.prepare is not None:
        check_count("--prepare", options.prepare, least=0)
    return form


def _is_special(path: Path | None) -> bool:
    """Whether a path is of something other than a file, such as a pipe or ``/dev/null``."""
    return path is not None and path.exists() and not path.is_file()


def _drawn(form: str, schedule: Schedule, out: Path | None) -> bytes | str:
    # Matplotlib is imported only if there is a picture to draw.
    if form == "trace":
        from swift.tools.draw.trace import trace_json

        return "".join(trace_json(schedule))
    from swift.tools.draw.picture import picture_file

    return picture_file(schedule, "png" if out and out.suffix.lower() == ".png" else "svg")


def _text(schedule: Schedule, lines: Sequence[str], out: Path | None) -> str:
    """Prints text with colours and in full width on a terminal; a file has no colours."""
    console = Console(highlight=False, force_terminal=None if out is None else False)
    chart = draw_chart(schedule, console.width, ascii_only=out is None and console.options.ascii_only)
    # Not written by rich, which ends the process if a pipe is closed.
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
        if _is_special(out):  # it must not be replaced
            out.write_bytes(data)
        else:
            replace_file(out, data)
    except OSError as error:
        raise SettingError("--out", str(out), f"cannot be written: {error.strerror}") from error


def _translate(error: SettingError, options: argparse.Namespace) -> SettingError:
    setting, value, allowed = error.setting, error.value, error.allowed
    if setting.startswith("Costs."):
        (name,) = (name for name, field in COST_NAMES.items() if setting == f"Costs.{field}")
        return SettingError("--costs", Written(f"{name}={value:g}"), allowed)
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
