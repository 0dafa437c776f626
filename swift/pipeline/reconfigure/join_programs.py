"""The programs that give a generation of processes its first state, each loaded from the cache or compiled now."""

from collections.abc import Callable, Sequence

import jax

from swift.mesh import giving_rows, share_rows
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.reconfigure.failure_config import Configuration
from swift.pipeline.runtime import StepSpec, TrainState


def compiled_init(spec: StepSpec, store: ExecutableCache, seed: int) -> Callable[[], TrainState]:
    """The program that makes the state before the first iteration."""
    live = spec.live
    init = jax.jit(lambda: spec.init(jax.random.key(seed)))
    key = "init", live.num_ranks, live.stage_R.tolist()
    return store.get(key, lambda: init.lower().compile(), list(live.mesh.devices.flat))


def compiled_slots(spec: StepSpec, store: ExecutableCache) -> Callable[[TrainState], TrainState]:
    """The program that fills the slots of a state without them, such as that of a checkpoint."""
    live = spec.live
    fill = jax.jit(spec.fill_slots)
    key = slots_key(live.num_ranks, live.stage_R.tolist())
    return store.get(key, lambda: fill.lower(spec.abstract()).compile(), list(live.mesh.devices.flat))


def slots_key(num_ranks: int, stages: Sequence[int]) -> object:
    """The cache key of the program of ``compiled_slots``."""
    return "slots", num_ranks, list(stages)


def compiled_share(
    spec: StepSpec, store: ExecutableCache, has_R: Sequence[bool]
) -> Callable[[TrainState], tuple[TrainState, jax.Array]]:
    """The program that copies the state to rows without one, see ``share_rows``.

    Args:
        spec: step spec on the live mesh.
        store: cache of the run.
        has_R: whether each row has the state; one of every stage has to.
    """
    live = spec.live
    share = jax.jit(share_rows(live, spec.specs, has_R))
    state = spec.abstract(with_slots=True)
    key = _key(live.stage_R.tolist(), has_R)
    return store.get(key, lambda: share.lower(state).compile(), list(live.mesh.devices.flat))


def share_key(configuration: Configuration, has_R: Sequence[bool]) -> object:
    """The cache key of the program of ``compiled_share``: it depends on the rows that give, not on those that take."""
    return _key([place.stage for place in configuration.places], has_R)


def _key(stages: list[int], has_R: Sequence[bool]) -> object:
    return "share", stages, giving_rows(stages, has_R)
