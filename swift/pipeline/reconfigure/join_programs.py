"""The programs that give a generation of processes its first state, each loaded from the cache or compiled now."""

from collections.abc import Callable, Sequence

import jax

from swift.pipeline.reconfigure.block_sharing import Routes, share_blocks
from swift.pipeline.reconfigure.executable_cache import ExecutableCache
from swift.pipeline.runtime import StepSpec, TrainState


def compiled_init(spec: StepSpec, store: ExecutableCache, seed: int) -> Callable[[], TrainState]:
    """The program that makes the state before the first iteration."""
    live = spec.live
    init = jax.jit(lambda: spec.init(jax.random.key(seed)))
    key = "init", live.num_ranks, spec.holding_R.tolist()
    return store.get(key, lambda: init.lower().compile(), list(live.mesh.devices.flat))


def compiled_slots(spec: StepSpec, store: ExecutableCache) -> Callable[[TrainState], TrainState]:
    """The program that fills the slots of a state without them, such as that of a checkpoint."""
    live = spec.live
    fill = jax.jit(spec.fill_slots)
    key = slots_key(spec)
    return store.get(key, lambda: fill.lower(spec.abstract()).compile(), list(live.mesh.devices.flat))


def slots_key(spec: StepSpec) -> object:
    """The cache key of the program of ``compiled_slots``; the mesh of ``spec`` may be on any devices."""
    return "slots", spec.live.num_ranks, spec.holding_R.tolist()


def compiled_share(
    old: StepSpec, new: StepSpec, store: ExecutableCache, has_R: Sequence[bool]
) -> Callable[[TrainState], tuple[TrainState, jax.Array]]:
    """The program that gives every row the blocks that it is to hold, see ``share_blocks``.

    Args:
        old: step spec of the state that rows have, on the live mesh.
        new: step spec of the state that they get, on the same mesh.
        store: cache of the run.
        has_R: whether each row has the state; one that holds it has to, for every chunk.
    """
    share = jax.jit(share_blocks(old, new, has_R))
    state, devices = old.abstract(with_slots=True), list(new.live.mesh.devices.flat)
    return store.get(share_key(old, new, has_R), lambda: share.lower(state).compile(), devices)


def share_key(old: StepSpec, new: StepSpec, has_R: Sequence[bool]) -> object:
    """The cache key of the program of ``compiled_share``: it depends on the rows that give, not on those that take."""
    holds = [(spec.chunks.sizes, spec.chunks.stage_DC, spec.holding_R.tolist()) for spec in (old, new)]
    return "share", new.live.num_ranks, holds, Routes.of(old, new, has_R).giver_C
