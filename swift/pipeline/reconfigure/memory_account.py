"""Memory account of a run: the bytes that its shapes determine, and the rest that its compiled program adds."""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from swift.mesh.devices import ProgramMemory
from swift.pipeline.state import EMBEDDING_AND_HEAD
from swift.pipeline.step.spec import StepSpec


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes that a run needs on a group of devices, in total; every device in the run needs the same amount.

    Attributes:
        num_devices: number of devices.
        state: master weights, moments and placement, as in a checkpoint.
        slots: weights in the slots.
        copies: part of ``slots`` that holds embedding and head; each rank has its own copy or shard.
        gradients: gradients of the slots, summed over micro-batches.
        stashes: values that F and B keep for later ops of the same micro-batch, and messages.
        earlier_states: states before the current one, with their slots, if iterations leave them unchanged.
        other_buffers: all other memory of the compiled program, or None if it is not compiled yet.
    """

    num_devices: int
    state: int
    slots: int
    copies: int
    gradients: int
    stashes: int
    earlier_states: int
    other_buffers: int | None = None

    @classmethod
    def of(
        cls, spec: StepSpec, stash_bytes: int, *, num_kept: int, num_workers: int, num_devices: int, share: float
    ) -> Self:
        """Adds up the shapes of a run's arrays, without compiling anything.

        Args:
            spec: step spec, on any mesh with the run's number of expert ranks.
            stash_bytes: bytes that every rank allocates for stashes and messages.
            num_kept: number of states before the current one that are kept.
            num_workers: total number of workers in the run.
            num_devices: number of devices that the account covers.
            share: fraction of the run's devices that the account covers.
        """
        shapes = spec.worker_shapes
        slots, whole = _num_bytes(shapes.slots), _num_bytes(shapes)
        wider = jnp.dtype(spec.accumulate_dtype).itemsize // jnp.dtype(spec.compute_dtype).itemsize

        def local_bytes(worker_bytes: int) -> int:
            return round(worker_bytes * num_workers * share)

        return cls(
            num_devices=num_devices,
            state=local_bytes(whole - slots),
            slots=local_bytes(slots),
            copies=local_bytes(sum(_num_bytes(shapes.slots.get(name)) for name in EMBEDDING_AND_HEAD)),
            gradients=local_bytes(slots * wider),
            stashes=local_bytes(spec.live.num_ranks * stash_bytes),
            earlier_states=num_kept * local_bytes(whole),
        )

    def compiled(self, program: ProgramMemory, *, has_host: bool) -> Self:
        """Returns the same account, completed with the other buffers of the compiled program.

        Args:
            program: memory of the program on one device.
            has_host: whether to include host memory.
        """
        on_device = program.needed + (sum(program.host) if has_host else 0)
        return replace(self, other_buffers=self.num_devices * on_device - self.by_shape)

    @property
    def by_shape(self) -> int:
        """Bytes that the shapes of the arrays determine."""
        return self.state + self.slots + self.gradients + self.stashes + self.earlier_states

    @property
    def total(self) -> int:
        """Total bytes known so far."""
        return self.by_shape + (self.other_buffers or 0)


def _num_bytes(shapes: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(shapes))
