"""Faults of disks, compiled programs and clocks."""

import signal
from pathlib import Path
from random import Random

from . import evidence, judge
from .kinds import Aftermath, Draw, Kind, Parameters, is_launch
from .processes import send
from .running import Run

_ENDING_S = 90.0


def _has_disk(run: Run) -> bool:
    return run.disk is not None


def _has_shim(run: Run) -> bool:
    return run.shim is not None


def _fill_disk(run: Run, parameters: Parameters, after: Aftermath) -> None:
    assert run.disk is not None
    run.disk.fill(parameters["left"])
    after.heal_after(parameters["seconds"], run.disk.empty)
    after.codes |= {judge.GIVES_UP}
    after.wants_checkpoint = True


def _draw_full(rng: Random, _: Run) -> Parameters:
    return {"left": rng.choice([0, 4096, 100_000, 2_000_000]), "seconds": round(rng.uniform(1.0, 6.0), 2)}


def _freeze_disk(run: Run, parameters: Parameters, after: Aftermath) -> None:
    assert run.disk is not None
    run.disk.freeze()
    after.heal_after(parameters["seconds"], run.disk.thaw)
    after.wants_checkpoint = True


def _lose_disk(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Makes the disk read-only, or fail all accesses, until the run has ended; then repairs it."""
    assert run.disk is not None
    after.promised = evidence.promised(run.events())
    if parameters["how"] == "read-only":
        run.disk.make_read_only()
    else:
        run.disk.cut_power()
    after.codes |= {judge.GIVES_UP}
    after.has_ended = True
    run.wait(run.is_over, "it continues without its disk", _ENDING_S)
    kept = str(run.run_dir)  # nothing can be removed from there
    after.complaints += [f"left behind: {one}" for one in run.leftovers() if not one.startswith(kept)]
    after.may_leave = True
    run.clear()
    run.disk.mount_again()


def _cut_power(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Ends all processes and drops everything that was not on the disk."""
    del parameters
    assert run.disk is not None
    after.promised = evidence.promised(run.events())
    run.disk.cut_power()
    send([one.pid for one in run.processes()], signal.SIGKILL)
    after.codes |= {-signal.SIGKILL, judge.GIVES_UP}
    after.has_ended = True
    run.wait(run.is_over, "it was killed", _ENDING_S)
    run.clear()
    after.may_leave = True
    run.disk.mount_again()


def _break_files(run: Run, parameters: Parameters, after: Aftermath) -> None:
    shim = run.shim
    assert shim is not None
    shim.break_files(parameters["functions"], error=parameters["error"], percent=parameters["percent"])
    after.heal_after(parameters["seconds"], lambda: shim.break_files([]))
    after.codes |= {judge.GIVES_UP}
    after.wants_checkpoint = True


def _draw_errors(rng: Random, _: Run) -> Parameters:
    functions = rng.choice(
        [["write"], ["sync"], ["rename"], ["open"], ["read"], ["open", "read", "write", "sync", "rename"]]
    )
    errors = ["EIO"] if functions in (["read"], ["sync"]) else ["EIO", "ENOSPC", "EROFS", "EDQUOT"]
    seconds = round(rng.uniform(0.2, 5.0), 2)
    return {
        "functions": functions,
        "error": rng.choice(errors),
        "percent": rng.choice([5, 30, 100]),
        "seconds": seconds,
    }


def _slow_files(run: Run, parameters: Parameters, after: Aftermath) -> None:
    shim = run.shim
    assert shim is not None
    shim.break_files(parameters["functions"], delay_s=parameters["delay_s"])
    after.heal_after(parameters["seconds"], lambda: shim.break_files([]))
    after.wants_checkpoint = True


def _draw_slow(rng: Random, _: Run) -> Parameters:
    functions = rng.choice([["write"], ["sync"], ["open", "read", "write", "sync", "rename"]])
    return {
        "functions": functions,
        "delay_s": rng.choice([0.01, 0.1, 1.0, 5.0]),
        "seconds": round(rng.uniform(1.0, 8.0), 2),
    }


def _shift_clock(run: Run, parameters: Parameters, after: Aftermath) -> None:
    assert run.shim is not None
    run.shim.shift_clock(run.shim.shift_s + parameters["by_s"])
    after.wants_checkpoint = True


def _draw_shift(rng: Random, _: Run) -> Parameters:
    return {"by_s": rng.choice([-1, 1]) * rng.choice([1.5, 10, 100, 3600, 86400 * 400])}


def _damage_programs(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Changes bytes of compiled programs, which then have to be compiled again."""
    choice = Random(parameters["choice"])
    programs = [path for path in run.tmp.glob("swift-*/programs/*") if not path.suffix and path.is_file()]
    hit = choice.sample(programs, min(len(programs), parameters["number"]))
    for path in sorted(hit):
        _flip(path, choice)
    after.observed["programs"] = len(hit)


def _flip(path: Path, choice: Random) -> None:
    with path.open("r+b") as file:
        file.seek(choice.randrange(max(1, path.stat().st_size)))
        file.write(bytes([choice.randrange(256)]))


def _seconds(low: float, high: float) -> Draw:
    return lambda rng, _: {"seconds": round(rng.uniform(low, high), 2)}


def _draw_programs(rng: Random, _: Run) -> Parameters:
    return {"number": rng.choice([1, 3, 1000]), "choice": rng.randrange(10**6)}


KINDS = [
    Kind("full-disk", _fill_disk, _draw_full, _has_disk, group="disk"),
    Kind("frozen-disk", _freeze_disk, _seconds(0.5, 10.0), _has_disk, group="disk"),
    Kind("lost-disk", _lose_disk, lambda rng, _: {"how": rng.choice(["read-only", "errors"])}, _has_disk, True, "disk"),
    Kind("cut-power", _cut_power, lambda _, __: {}, _has_disk, True, "disk"),
    Kind("io-error", _break_files, _draw_errors, _has_shim, group="disk"),
    Kind("slow-disk", _slow_files, _draw_slow, _has_shim, group="disk"),
    Kind("clock-jump", _shift_clock, _draw_shift, _has_shim, group="clock"),
    Kind("damage-programs", _damage_programs, _draw_programs, is_launch),
]
