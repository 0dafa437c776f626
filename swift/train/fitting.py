"""Checks whether a run fits into its devices' memory, or into this machine's memory if devices are emulated.

The shapes are checked before anything is compiled, and the compiled program before the first state is created. The
account covers one iteration. It does not include the process itself, a checkpoint's copy or programs that are compiled
ahead. A run whose account is too large therefore does not fit, but a run whose account barely fits may not fit either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.machine import Room, memory_rooms, size_text
from swift.mesh.live import storage_mesh
from swift.pipeline.reconfigure.configuration import Configurator
from swift.pipeline.reconfigure.engine import Engine
from swift.pipeline.reconfigure.memory_account import MemoryAccount
from swift.train.build import make_plan_settings, make_step_spec, users_settings

_MARGIN_BYTES, _MARGIN_SHARE = 200_000_000, 0.1
"""Margin for memory outside the account; the measured peaks of small and medium runs were 65 to 410 MB above it."""


@dataclass(frozen=True)
class Fit:
    """The memory that a run needs, and the memory that is available.

    Attributes:
        experiment: settings of the run.
        account: memory that the run takes on this process's devices or on this machine.
        rooms: memory limits, all of which apply: the devices' memory, or this machine's and its control groups'.
    """

    experiment: Experiment
    account: MemoryAccount
    rooms: tuple[Room, ...]

    def check(self) -> str | None:
        """Compares the needed memory with the available memory.

        Returns:
            A warning if too little memory is free now, or None if there is enough.

        Raises:
            SettingError: the run would not fit even if nothing else used the memory.
        """
        needed = self.account.total
        smallest = min(self.rooms, key=lambda room: room.size + room.swap)
        if needed > smallest.size + smallest.swap:
            raise SettingError("Experiment.ranks", self.experiment.ranks, self._text(smallest))
        fullest = min(self.rooms, key=lambda room: room.left)
        if needed * (1 + _MARGIN_SHARE) + _MARGIN_BYTES > fullest.left:
            return f"memory may not be enough: {self._text(fullest)}"
        return None

    def _text(self, room: Room) -> str:
        account = self.account
        parts = {
            "state": account.state,
            "slots": account.slots,
            "gradients": account.gradients,
            "stashes": account.stashes,
            "earlier states": account.earlier_states,
            "other buffers": account.other_buffers or 0,
        }
        largest = sorted(((size, name) for name, size in parts.items() if size > 0), reverse=True)
        where = f"{account.num_devices} device{'s' * (account.num_devices > 1)}"
        takes = f"{where} take{'s' * (account.num_devices == 1)} {size_text(account.total)}"
        takes += " of memory or more" if account.other_buffers is None else " of memory"
        has = f"{room.whose} has {size_text(room.size)}, of which {size_text(room.left)} are free"
        has += f", and {size_text(room.swap)} of swap" if room.swap else ""
        breakdown = ", ".join(f"{name} {size_text(size)}" for size, name in largest)
        return f"{takes} ({breakdown}), and {has}; less with {self._remedies()}"

    def _remedies(self) -> str:
        """Lists up to five changes of settings that save memory, by decreasing estimated savings."""
        experiment, account = self.experiment, self.account
        experts, num_ranks = experiment.experts, experiment.topology.num_expert_ranks
        dense, per_micro_batch = account.copies * 2, account.stashes + max(0, account.other_buffers or 0)
        spare = 1 - experts.num_classes / (num_ranks * experts.slots_per_rank)
        savings = {
            "Experiment.embedding and Experiment.head = 'sharded'": (
                dense * (1 - 1 / num_ranks) if "replicated" in (experiment.embedding, experiment.head) else 0
            ),
            "fewer Topology.num_expert_ranks": dense * (1 - 1 / num_ranks),
            "fewer ExpertConfig.slots_per_rank": spare * (account.slots + account.gradients - dense),
            "OptimizerConfig.moments = 'bfloat16'": (
                account.state / 3 if experiment.optimizer.moments == "master" else 0
            ),
            "fewer Experiment.sequences_per_microbatch": per_micro_batch / 2,
            "Experiment.remat = 'block'": account.stashes / 2 if experiment.remat == "none" else 0,
            "Experiment.window = 1": account.earlier_states if experiment.window > 1 else 0,
            "Experiment.compute_dtype = 'float32'": (account.total / 2 if experiment.compute_dtype == "float64" else 0),
        }
        helpful = [name for name, saved in savings.items() if saved > account.total / 50]
        helpful.sort(key=lambda name: -savings[name])
        return ", ".join([*helpful, "a smaller Experiment.model"][:5])


def check_shapes(experiment: Experiment, engine: Engine, num_iterations: int) -> None:
    """Checks the memory that a run needs according to its shapes alone, before anything is compiled.

    Args:
        experiment: settings of the run.
        engine: engine of the run.
        num_iterations: length of the first window.

    Raises:
        SettingError: the run does not fit on the devices of this process.
    """
    fit = _by_shape(experiment, engine, num_iterations)
    if fit is not None:
        fit.check()


def check_program(experiment: Experiment, engine: Engine, num_iterations: int) -> str | None:
    """Compiles the run's first program, and checks all the memory that it takes.

    Args:
        experiment: settings of the run.
        engine: engine of the run, before any state is on its devices.
        num_iterations: length of the first window.

    Returns:
        A warning if little memory is left; None if there is enough, or if the amount of memory is unknown.

    Raises:
        SettingError: the run does not fit on the devices of this process.
    """
    fit, steps = _by_shape(experiment, engine, num_iterations), engine.steps
    if fit is None:
        return None
    program = steps.memory("window" if _is_window(engine, num_iterations) else "single")
    if program is None:
        return fit.check()
    uses_host_memory = _own_memory(_devices_here(engine)) is None
    return replace(fit, account=fit.account.compiled(program, has_host=uses_host_memory)).check()


def check_processes(experiment: Experiment, num_here: int, num_processes: int) -> str | None:
    """Checks whether a run with several processes fits into this machine's memory, according to its shapes.

    Each process holds three states: those of the last two iterations, and the one being computed. Gradients and stashes
    are counted too, but not the other buffers of the compiled program.

    Args:
        experiment: settings of the run.
        num_here: number of the run's processes on this machine, which compute on CPUs.
        num_processes: total number of processes of the run.

    Returns:
        A warning if little memory is left; None if there is enough, or if the amount of memory is unknown.

    Raises:
        SettingError: the processes on this machine do not fit.
    """
    rooms, topology = memory_rooms(), experiment.topology
    if not rooms:
        return None
    share, spec = num_here / num_processes, make_step_spec(experiment, storage_mesh(topology))
    with users_settings():
        settings = make_plan_settings(experiment, spec)
        plans = Configurator(settings).configure(frozenset()).plans
    account = MemoryAccount.of(
        spec,
        plans[max(plans)].stash_bytes(settings.sizes),
        num_kept=2,
        num_workers=len(topology.workers),
        num_devices=round(topology.num_devices * share),
        share=share,
    )
    return Fit(experiment, account, rooms).check()


def _by_shape(experiment: Experiment, engine: Engine, num_iterations: int) -> Fit | None:
    """Computes the memory account from shapes alone; returns None if the amount of available memory is unknown."""
    spec, devices = engine.spec, _devices_here(engine)
    device_room = _own_memory(devices)
    rooms = memory_rooms() if device_room is None else (device_room,)
    if not rooms or not devices:
        return None
    account = MemoryAccount.of(
        spec,
        engine.stash_bytes,
        num_kept=int(_is_window(engine, num_iterations)),
        num_workers=spec.live.num_live,
        num_devices=len(devices),
        share=len(devices) / spec.live.mesh.size,
    )
    if device_room is not None and spec.memory != "device":  # weights and moments are elsewhere
        account = replace(account, state=0, earlier_states=0)
    return Fit(experiment, account, rooms)


def _is_window(engine: Engine, num_iterations: int) -> bool:
    """Whether the iterations run as one program, which also keeps the state before the window."""
    return num_iterations > 1 and engine.steps.main == "window"


def _devices_here(engine: Engine) -> list[jax.Device]:
    """Lists the run's devices that belong to this process."""
    return [device for device in engine.spec.live.mesh.devices.flat if device.process_index == jax.process_index()]


def _own_memory(devices: Sequence[jax.Device]) -> Room | None:
    """Returns the devices' total memory, assuming equal use of each; None if they use the host's memory."""
    stats = [device.memory_stats() for device in devices]
    if not stats or not all(stat and "bytes_limit" in stat for stat in stats):
        return None
    size = min(stat["bytes_limit"] for stat in stats)
    left = min(stat["bytes_limit"] - stat.get("bytes_in_use", 0) for stat in stats)
    kind, count = devices[0].device_kind, len(devices)
    return Room(count * max(0, left), count * size, 0, kind if count == 1 else f"the set of {count} {kind}")
