"""From one set of live workers to the next: what a window may span, and whether every stage's state is still there."""

from collections.abc import Collection

from swift.errors import SettingError
from swift.mesh import MeshRow
from swift.pipeline import Engine
from swift.topology import Topology, Worker
from swift.train.settings import FAILURES_SETTING, FailureList


def window_length(
    window: int, done: int, last_step: int, periods: Collection[int], breaks: Collection[int] = ()
) -> int:
    """How many iterations come next as one program: a window, or one where something is due before the window's end.

    Args:
        window: K.
        done: iterations done.
        last_step: of this invocation; it is due, too.
        periods: what is due every so many iterations; 0: never.
        breaks: iterations after which something is due.

    >>> [window_length(3, done, 20, periods=(7, 0)) for done in (0, 3, 6, 7, 18)]
    [3, 3, 1, 3, 1]
    """
    inside = range(done + 1, done + window)
    is_cut = done + window > last_step or any(
        step in breaks or any(period and step % period == 0 for period in periods) for step in inside
    )
    return 1 if is_cut else window


def is_due(done: int, every: int, num_steps: int) -> bool:
    """Whether what is due every so many iterations, and after the last one, is due now; 0: never.

    >>> [done for done in range(1, 8) if is_due(done, 3, 7)], is_due(7, 0, 7)
    ([3, 6, 7], False)
    """
    return bool(every) and (done % every == 0 or done == num_steps)


def lost_stages(
    topology: Topology, places: Collection[MeshRow], before: frozenset[Worker], failed: frozenset[Worker]
) -> list[int]:
    """The stages that nobody is left to serve, or whose state nobody has any more.

    A worker may serve another stage than its own. Who comes back has copied the state of its stage before anybody else
    fails.

    Args:
        topology: the whole cluster.
        places: who serves which stage so far.
        before: the workers that were down.
        failed: those that are down from now on.
    """
    manned = {stage for pipeline, stage in topology.workers if (pipeline, stage) not in failed}
    kept = {place.stage for place in places if place.worker not in failed}
    kept |= {stage for _, stage in before - failed}
    return [stage for stage in range(topology.num_stages) if stage not in manned & kept]


def check_failures(engine: Engine, failures: FailureList, window: int) -> None:
    """Plans all that a list leads to, before anything has run.

    Raises:
        SettingError: a stage's state is lost, or there is no plan for some of the failures.
    """
    topology, before = engine.spec.live.topology, frozenset[Worker]()
    places = engine.configure(before).places
    for step in sorted({event.step for event in failures.events}):
        failed = failures.failed(step, step + window - 1)
        for stage in lost_stages(topology, places, before, failed):
            allowed = f"leave nobody with the state of stage {stage} at step {step}, after roles have moved"
            raise SettingError(
                FAILURES_SETTING, ["{} {}:{}".format(event.kind, *event.worker) for event in failures.events], allowed
            )
        places, before = engine.configure(failed).places, failed
