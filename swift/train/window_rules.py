"""Rules of windows: how long they may be, and whether each stage's state survives from one to the next."""

from collections.abc import Collection

from swift.errors import SettingError
from swift.mesh.live import MeshRow
from swift.models.cuts.chunks import Chunks
from swift.pipeline.reconfigure.engine import Engine
from swift.topology import Topology, Worker
from swift.train.settings.failure_list import FAILURES_SETTING, FailureList


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
    chunks: Chunks,
    own: Chunks,
) -> list[int]:
    """Returns the stages without a live worker, and those that hold a block without one or of which the state is lost.

    A worker may have another's place. A worker that rejoins has copied the state of its stage before any other fails.

    Args:
        topology: whole cluster.
        rows: workers and the places that they have had so far.
        before: workers that were down.
        failed: workers that are down from now on.
        chunks: what the workers hold in these places.
        own: what they hold in their own, from now on.
    """
    live = set(topology.workers) - failed
    kept = {row.role for row in rows if row.worker not in failed}
    lost = set(range(topology.num_stages)) - {stage for _, stage in live}
    for held_D, stage_D in zip(chunks.stage_DB.T.tolist(), own.stage_DB.T.tolist(), strict=True):
        holders = set(enumerate(stage_D))
        has_state = not kept.isdisjoint(enumerate(held_D)) or not holders.isdisjoint(before - failed)
        if holders.isdisjoint(live) or not has_state:
            lost.update(stage_D)
    return sorted(lost)


def check_failures(engine: Engine, failures: FailureList, window: int) -> None:
    """Plans for all failures of a list, before anything has run.

    Raises:
        SettingError: a stage's state is lost, or there is no plan for some of the failures.
    """
    topology, before, own = engine.spec.live.topology, frozenset[Worker](), engine.own_chunks
    rows = engine.configure(before).rows
    for step in sorted({event.step for event in failures.events}):
        failed = failures.failed(step, step + window - 1)
        for stage in lost_stages(topology, rows, before, failed, own, own):
            allowed = f"leave no worker with the state of stage {stage} at step {step}"
            raise SettingError(
                FAILURES_SETTING, ["{} {}:{}".format(event.kind, *event.worker) for event in failures.events], allowed
            )
        rows, before = engine.configure(failed).rows, failed
