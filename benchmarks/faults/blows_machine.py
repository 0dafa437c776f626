"""Faults of what a machine lends to a run: directories for temporary files, shared memory, and tasks."""

import shutil
import signal
from pathlib import Path
from random import Random

from . import judge
from .kinds import Aftermath, Draw, Kind, Parameters, is_launch
from .processes import send
from .running import Run
from .tmpfs import Tmpfs

_MEMORY = Path("/dev/shm")
_SHARED_MEMORY = Tmpfs(_MEMORY)
_ENDING_S = 90.0


def _remove_directories(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Removes what is there for temporary files, as a system does at the end of a user's session."""
    places = {"shm": _MEMORY, "tmp": run.tmp}
    nodes = {node.pid: node for node in run.life.nodes}
    found = [(pid, path) for pid in nodes for name in parameters["which"] for path in _of_process(pid, places[name])]
    removed = [path for _, path in found] + [run.tmp] * ("tmp" in parameters["which"])
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)

    def are_back() -> bool:
        return all(path.exists() or nodes[pid].poll() is not None for pid, path in found)

    after.awaited.append((are_back, "its directories are not made again"))
    after.may_lose_states = after.wants_checkpoint = True


def _of_process(pid: int, place: Path) -> list[Path]:
    return list(place.glob(f"swift-{pid}-*"))


def _fill_temporary(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Leaves the directory for temporary files few bytes or inodes for a time."""
    filesystem = run.temporary
    assert filesystem is not None
    if parameters["of"] == "inodes":
        filesystem.leave(num_inodes=parameters["left"])
    else:
        filesystem.leave(num_bytes=parameters["left"])
    after.heal_after(parameters["seconds"], filesystem.empty)
    after.codes |= {judge.GIVES_UP}
    after.wants_checkpoint = True


def _draw_temporary(rng: Random, _: Run) -> Parameters:
    of = rng.choice(["inodes", "inodes", "bytes"])
    left = rng.choice([0, 0, 1, 5] if of == "inodes" else [0, 4096, 100_000])
    return {"of": of, "left": left, "seconds": round(rng.uniform(1.0, 6.0), 2)}


def _limit_tasks(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Lets the run start hardly any threads and processes for a time; a process that needs one may die."""
    tasks = run.tasks
    assert tasks is not None
    tasks.leave(parameters["left"])
    after.heal_after(parameters["seconds"], tasks.lift)
    after.out_of_reach.update(run.shape.members)
    # JAX's coordination service, in the first process, and TensorStore abort where they can start no thread.
    after.codes |= {judge.GIVES_UP, -signal.SIGABRT}
    after.wants_checkpoint = True


def _draw_tasks(rng: Random, _: Run) -> Parameters:
    return {"left": rng.choice([0, 0, 1, 8]), "seconds": round(rng.uniform(0.5, 5.0), 2)}


def _fill_memory(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Fills shared memory for a time, so that a recovery does not find the room that it needs."""
    del run
    _SHARED_MEMORY.leave(num_bytes=parameters["bytes"])
    after.heal_after(parameters["seconds"], _SHARED_MEMORY.leave)
    after.codes |= {judge.GIVES_UP}


def _draw_memory(rng: Random, _: Run) -> Parameters:
    return {"seconds": round(rng.uniform(1.0, 6.0), 2), "bytes": rng.choice([0, 65_536, 1_000_000])}


def _start_with_little_memory(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Limits shared memory to that of some containers, for the next and later starts of the run."""
    send([run.life.first.pid], signal.SIGKILL)
    after.codes |= {-signal.SIGKILL}
    after.has_ended = True
    run.wait(run.is_over, "it was killed", _ENDING_S)
    run.leftovers()
    _SHARED_MEMORY.leave(num_bytes=parameters["bytes"])
    after.later.append(_SHARED_MEMORY.leave)


def _draw_little(rng: Random, _: Run) -> Parameters:
    return {"bytes": rng.choice([65_536, 1 << 20, 4 << 20])}


def _is_private(run: Run) -> bool:
    return run.place.is_private and is_launch(run)


def _has_temporary(run: Run) -> bool:
    return run.temporary is not None


def _has_tasks(run: Run) -> bool:
    return run.tasks is not None


def _which(*which: str) -> Draw:
    return lambda _, __: {"which": list(which)}


KINDS = [
    Kind("remove-tmp", _remove_directories, _which("tmp"), group="tmp"),
    Kind("remove-shm", _remove_directories, _which("shm"), is_launch, group="shm"),
    Kind("remove-both", _remove_directories, _which("shm", "tmp"), is_launch, group="shm"),
    Kind("full-tmp", _fill_temporary, _draw_temporary, _has_temporary, group="tmp"),
    Kind("full-shm", _fill_memory, _draw_memory, _is_private, group="shm"),
    Kind("small-shm", _start_with_little_memory, _draw_little, _is_private, ends=True, group="shm", is_quiet=True),
    Kind("few-tasks", _limit_tasks, _draw_tasks, _has_tasks, group="start"),
]
