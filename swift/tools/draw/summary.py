"""Text summary of a schedule for ``swift plan``, made from its JSON document."""

from collections.abc import Iterator, Mapping
from typing import Any

from swift.schedules.problem import Problem
from swift.tools.draw.rows import blocks_name, counted, describe

MAX_COLUMNS, MAX_LINES, STAGES_PER_LINE = 12, 16, 12


def summarize(problem: Problem, document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines above the chart.

    Args:
        problem: problem that was planned.
        document: JSON document of the schedule.
    """
    planned = f"in {document['planning_ms']:,.0f} ms" if document["planning_ms"] else "before, found in the store"
    yield describe(problem)
    held = ["each W held to its B"] * (not problem.decoupled) + ["all updates at once"] * (not problem.staggered)
    yield from _cuts(problem)
    yield ", ".join([f"planned by {document['solver']} {planned}", *held])
    yield ""
    yield from _times(document)
    yield ""
    if document["fault_free"]:
        yield from _costs_of_failures(document)
        yield ""
    yield from _memory(problem, document["peak_memory"])


def _cuts(problem: Problem) -> Iterator[str]:
    """Yields the blocks of the stages, once for all pipelines that are cut alike."""
    cuts: dict[tuple[str, ...], list[int]] = {}
    for d in range(problem.num_pipelines):
        blocks = tuple(blocks_name(problem, (d, p)) or "none" for p in range(problem.num_stages))
        cuts.setdefault(blocks, []).append(d)
    if not any(map(problem.runs_of, problem.topology.workers)):
        return
    for stages, pipelines in cuts.items():
        whose = "" if len(cuts) == 1 else f" of pipeline{'s' * (len(pipelines) > 1)} {', '.join(map(str, pipelines))}"
        yield f"blocks by stage{whose}: {' | '.join(stages)}"


def _times(document: Mapping[str, Any]) -> Iterator[str]:
    iterations, bound = document["iterations"], f"bound {document['lower_bound']:.6g}, gap {_percent(document['gap'])}"
    if document["tight_bound"] > document["lower_bound"]:
        bound += f"; tight bound {document['tight_bound']:.6g}"
    table = document["tick_table"]
    permutations = f"{table['activation_permutations']} + {table['gradient_permutations']} permutations of messages"
    in_ticks = f"in {table['ticks']} ticks, each as long as its longest op; {permutations}"
    of_window = f"in a window of {counted(iterations, 'iteration')} that drains (makespan {document['makespan']:.6g})"
    yield f"period           {document['period']:<10.6g} {bound}"
    yield f"  in a window    {document['window_period']:<10.6g} {of_window}"
    yield f"  in lockstep    {document['lockstep_period']:<10.6g} {in_ticks}"
    yield f"bubbles          {_percent(document['bubble_share']):<10} of the live workers' time in the steady state"


def _costs_of_failures(document: Mapping[str, Any]) -> Iterator[str]:
    yield "without failures     period   throughput of this plan"
    for name, key in (("1F1B", "one_f_one_b"), ("zero bubble", "zero_bubble")):
        share = document[f"throughput_vs_{key}"]
        change = "the same"
        if abs(share - 1) >= 0.0005:
            change = f"{_percent(abs(share - 1))} {'gained' if share > 1 else 'lost'}"
        yield f"  {name:<14} {document['fault_free'][key]:>10.6g}   {_percent(share)}, {change}"


def _memory(problem: Problem, peaks: Mapping[str, float]) -> Iterator[str]:
    D, P, limit = problem.num_pipelines, problem.num_stages, problem.memory_limit
    limit_text = "no limit" if limit is None else f"limit {limit / problem.costs.f_stash:.4g}"
    if D <= MAX_LINES and P <= MAX_COLUMNS:
        yield f"peak memory in F-stashes ({limit_text})"
        yield "             stage" + "".join(f"{p:>6}" for p in range(P))
        for d in range(D):
            cells = (f"{peaks[f'{d}:{p}']:.4g}" if (d, p) not in problem.failed else "-" for p in range(P))
            yield f"  pipeline {d:<7}" + "".join(f"{cell:>6}" for cell in cells)
        return
    yield f"peak memory in F-stashes ({limit_text}): the highest among each stage's workers"
    most = [max(peaks[f"{d}:{p}"] for d in range(D)) for p in range(P)]
    for p in range(0, P, STAGES_PER_LINE):
        yield f"  stage {p:<4}" + "".join(f"{peak:>6.4g}" for peak in most[p : p + STAGES_PER_LINE])


def _percent(share: float) -> str:
    # Adding 0.0 removes the sign of a negative zero.
    return f"{round(100 * share, 1) + 0.0:.1f} %"
