"""Rules of windows: how long they may be, and whether each stage's state survives from one to the next."""

from collections.abc import Collection

from swift.errors import SettingError
from swift.mesh import MeshRow
from swift.models import Chunks
from swift.pipeline import Engine
from swift.topology import Topology, Worker
from swift.train.settings import FAILURES_SETTING, FailureList


def window_length(
    window: int, done: int, last_step: int, periods: Collection[int], breaks: Collection[int] = ()
) -> int:
    """Number of iterations that run next as one program: a window, or one if something is due before the window's end.

    Args:
        window: K, iterations of a window.
        done: iterations done.
        last_step: last iteration of this invocation, after which something is due.
        periods: periods, in iterations, of what is due regularly; 0: never.
        breaks: iterations after which something else is due.

    >>> [window_length(3, done, 20, periods=(7, 0)) for done in (0, 3, 6, 7, 18)]
    [3, 3, 1, 3, 1]
    """
    inside = range(done + 1, done + window)
    is_cut = done + window > last_step or any(
        step in breaks or any(period and step % period == 0 for period in periods) for step in inside
    )
    return 1 if is_cut else window


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether something is due now that is due every ``every`` iterations and after the last one; 0: never.

    >>> [done for done in range(1, 8) if is_due(done, 3, 7)], is_due(7, 0, 7)
    ([3, 6, 7], False)
    """
    return bool(every) and (done % every == 0 or done == num_steps)


def lost_stages(
    topology: Topology,
    rows: Collection[MeshRow],
    before: frozenset[Worker],
    failed: frozenset[Worker],
    chunks: Chunks | None = None,
) -> list[int]:
    """Returns the stages without a live worker, or whose state is lost.

    Where pipelines are cut differently, these are also the stages that hold a chunk of which that is so. A worker may
    serve another stage than its own. A worker that rejoins has copied the state of its stage before any other fails.

    Args:
        topology: whole cluster.
        rows: workers and the stages that they have served so far.
        before: workers that were down.
        failed: workers that are down from now on.
        chunks: what the workers hold; None: a stage, which all pipelines have alike.
    """
    live = [worker for worker in topology.workers if worker not in failed]
    kept = [row.role for row in rows if row.worker not in failed] + list(before - failed)
    stages = (tuple(range(topology.num_stages)),) * topology.num_pipelines
    stage_DC = stages if chunks is None or chunks.is_one_cut else chunks.stage_DC
    lost = set(range(topology.num_stages)) - {stage for _, stage in live}
    for stage_D in zip(*stage_DC, strict=True):
        holders = set(enumerate(stage_D))
        if holders.isdisjoint(live) or holders.isdisjoint(kept):
            lost.update(stage_D)
    return sorted(lost)


def check_failures(engine: Engine, failures: FailureList, window: int) -> None:
    """Plans for all failures of a list, before anything has run.

    Raises:
        SettingError: a stage's state is lost, or there is no plan for some of the failures.
    """
    topology, before = engine.spec.live.topology, frozenset[Worker]()
    rows = engine.configure(before).rows
    for step in sorted({event.step for event in failures.events}):
        failed = failures.failed(step, step + window - 1)
        for stage in lost_stages(topology, rows, before, failed, engine.spec.chunks):
            allowed = f"leave no worker with the state of stage {stage} at step {step}, after roles have moved"
            raise SettingError(
                FAILURES_SETTING, ["{} {}:{}".format(event.kind, *event.worker) for event in failures.events], allowed
            )
        rows, before = engine.configure(failed).rows, failed
