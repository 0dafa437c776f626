"""``swift plan --adapt``: what the survivors of a failure do, what moves, and when that has paid for itself."""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift.cli.options.cuts import BlockOptions
from swift.cli.options.mistakes import nearest
from swift.cli.options.named import costs_of, seconds_of
from swift.errors import SettingError, check_number
from swift.schedules.adapt.choice import MODES, Adaptation, adapt, fault_free, rerouted
from swift.schedules.adapt.work import BlockProblem
from swift.schedules.problem import Problem
from swift.topology import Topology


@dataclass(frozen=True, eq=False)
class AdaptedPlan:
    """A plan with what there is to say about it.

    Attributes:
        plan: plan for the survivors.
        facts: keys of the JSON document, see ``facts_of``.
        planning_ms: time that it took to choose and to plan, in milliseconds.
    """

    plan: Adaptation
    facts: Mapping[str, Any]
    planning_ms: float


def check_adapt(options: argparse.Namespace) -> None:
    """Checks what goes together with ``--adapt``.

    Raises:
        SettingError: there is no such mode, or another option contradicts it.
    """
    if options.adapt is None:
        if options.outage:
            raise SettingError("--outage", options.outage, "needs --adapt")
        return
    if options.adapt not in MODES:
        allowed = f"must be one of {', '.join(MODES)}"
        raise SettingError("--adapt", options.adapt, nearest(options.adapt, MODES, allowed))
    if not options.fail:
        raise SettingError("--adapt", options.adapt, "needs --fail, the workers that are down")
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


def block_problem(options: argparse.Namespace, problem: Problem) -> BlockProblem:
    """Makes the problem without failures from the one that the options describe."""
    topology = Topology(options.pipelines, options.stages)
    cut = BlockOptions(options.blocks, options.cut, options.embedding, options.head)
    problem, number = replace(problem, failed=frozenset()), problem.num_chunks
    if options.blocks is None:
        return BlockProblem.of_stages(problem)
    sizes = tuple(chunk.num_blocks for chunk in problem.chunks) or (options.blocks // number,) * number
    return BlockProblem(problem, cut.blocks(topology, costs_of(options.costs)), sizes)


def adapted(options: argparse.Namespace, problem: Problem) -> AdaptedPlan:
    """Plans as ``--adapt`` says."""
    work, failed = block_problem(options, problem), problem.failed
    outage_s = seconds_of("--outage", options.outage) if options.outage else math.inf
    started = time.perf_counter()
    plan = adapt(
        work,
        failed,
        options.adapt,
        outage_s=outage_s,
        block_bytes=options.block_bytes,
        bandwidth=options.bandwidth,
        in_lockstep=options.solver == "lockstep",
    )
    planning_ms = 1e3 * (time.perf_counter() - started)
    stayed = plan if plan.mode == "reroute" else rerouted(work, failed, in_lockstep=plan.in_lockstep)
    seconds = plan.relocation.seconds(options.block_bytes, options.bandwidth)
    return AdaptedPlan(plan, facts_of(plan, stayed, seconds, options.block_bytes), planning_ms)


def facts_of(plan: Adaptation, stayed: Adaptation, move_s: float, block_bytes: float) -> dict[str, Any]:
    """Describes a plan.

    The keys: ``adapt``, the mode that was chosen; ``blocks_of_worker``, first block and end (with ``--solver v`` those
    of each run), null for an idle worker; ``place_of_worker``, of the workers that take another's place;
    ``microbatches_of_pipeline``; ``throughput``, ``reroute_throughput`` and ``ideal_throughput``, relative to the
    zero-bubble plan without a failure, with ``--solver lockstep`` both in lockstep, with ``--solver v`` to its plan;
    ``moved_bytes``, ``move_s``; ``pays_after_s``, null if the move never pays.
    """
    without = fault_free(plan.work, in_lockstep=plan.in_lockstep).period
    return {
        "adapt": plan.mode,
        "blocks_of_worker": {
            f"{d}:{p}": _blocks(runs, in_v=plan.work.in_v) for (d, p), runs in plan.blocks_of_worker.items()
        },
        "place_of_worker": {
            f"{d}:{p}": f"{e}:{q}" for (d, p), (e, q) in plan.relocation.place_of.items() if (d, p) != (e, q)
        },
        "microbatches_of_pipeline": list(plan.schedule.problem.microbatches),
        "throughput": without / plan.period,
        "reroute_throughput": without / stayed.period,
        "ideal_throughput": plan.ideal_throughput,
        "moved_bytes": plan.relocation.moved_blocks * block_bytes,
        "move_s": move_s,
        "pays_after_s": plan.pays_after_s(stayed, move_s),
    }


def adapted_lines(adapted: AdaptedPlan) -> Iterator[str]:
    """Yields the lines of the text."""
    facts = adapted.facts
    what = {
        "reroute": "re-routing, nothing moves",
        "roles": "workers take failed ones' places",
        "recut": "pipelines cut anew",
    }
    numbers = ", ".join(map(str, facts["microbatches_of_pipeline"]))
    yield f"adapted by {facts['adapt']}: {what[facts['adapt']]}; micro-batches of the pipelines: {numbers}"
    yield (
        f"throughput       {_percent(facts['throughput']):<10} of the zero-bubble plan's without a failure; "
        f"re-routing {_percent(facts['reroute_throughput'])}, live workers {_percent(facts['ideal_throughput'])}"
    )
    for worker, place in facts["place_of_worker"].items():
        yield f"  worker {worker} takes the place {place}"
    moved = f"{facts['moved_bytes'] / 1e9:.3g} GB move in {facts['move_s']:.3g} s"
    if not facts["moved_bytes"]:
        return
    pays = facts["pays_after_s"]
    yield f"{moved}, which " + (
        "never pays" if pays is None else f"pays in an outage of more than {pays:.3g} s, the way back counted"
    )


def _blocks(runs: Sequence[tuple[int, int]], *, in_v: bool) -> list[Any] | None:
    """First block and end; in a V those of each run."""
    if not runs:
        return None
    return [list(run) for run in runs] if in_v else list(runs[0])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
