"""Damage to files of a run that has ended, and rivals of one that has not."""

import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

from . import evidence
from .kinds import Aftermath, Draw, Kind, Parameters
from .processes import send
from .running import Run
from .shapes import STOPPING_S

_REFUSED = 2
_HOW = ("flip", "truncate", "zero", "remove", "append", "empty")
_LINES = ("metrics.jsonl", "events.jsonl")


def _arrays(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.glob("checkpoints/step-*/arrays/**/*") if path.is_file()]


def _manifests(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("checkpoints/step-*/manifest.json"))


def _named(name: str) -> Callable[[Path], list[Path]]:
    return lambda run_dir: [path for path in (run_dir / name,) if path.exists()]


def _others(run_dir: Path) -> list[Path]:
    """Finds all other files in the run directory itself: configuration, locks, metrics."""
    return [path for path in run_dir.iterdir() if path.is_file() and path.name not in _LINES]


_TARGETS = {
    "damage-checkpoint": _arrays,
    "damage-manifest": _manifests,
    "damage-metrics": _named("metrics.jsonl"),
    "damage-events": _named("events.jsonl"),
    "damage-other": _others,
}


def _damage(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Ends the run, damages some of its files, and records how to repair them."""
    choice = Random(parameters["choice"])
    send([run.life.first.pid], signal.Signals[parameters["signal"]])
    after.codes |= {-signal.SIGKILL, 130}
    after.has_ended = True
    run.wait(run.is_over, "it was asked to end", STOPPING_S)
    run.leftovers()
    files = sorted(_TARGETS[parameters["what"]](run.run_dir))
    files = choice.sample(files, min(len(files), parameters["number"]))
    before = {path: path.read_bytes() for path in files}
    steps = set(evidence.losses(run.run_dir))
    after.promised = evidence.promised(run.events())
    for path in files:
        _change(path, parameters["how"], choice)
    after.observed["damaged"] = [str(path.relative_to(run.run_dir)) for path in files]
    is_checkpoint = parameters["what"] in ("damage-checkpoint", "damage-manifest")
    after.may_be_older = is_checkpoint
    if parameters["what"] == "damage-metrics":
        after.excused |= steps

    def undo() -> None:
        for path, content in before.items():
            path.write_bytes(content)
        after.excused.clear()

    after.undo = undo


def _change(path: Path, how: str, choice: Random) -> None:
    content = bytearray(path.read_bytes())
    at = choice.randrange(len(content)) if content else 0
    if how == "remove":
        path.unlink()
        return
    if how == "flip" and content:
        content[at] ^= 1 << choice.randrange(8)
    elif how == "truncate":
        del content[at:]
    elif how == "zero":
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    elif how == "append":
        content += choice.randbytes(choice.choice([1, 100, 5000]))
    elif how == "empty":
        content.clear()
    path.write_bytes(content)


def _draw(what: str) -> Draw:
    def draw(rng: Random, _: Run) -> Parameters:
        number = rng.choice([1, 1, 3]) if what in ("damage-checkpoint", "damage-manifest") else 1
        how, ended = rng.choice(_HOW), rng.choice(["SIGKILL", "SIGINT"])
        return {"what": what, "how": how, "number": number, "choice": rng.randrange(10**6), "signal": ended}

    return draw


def _rival(run: Run, parameters: Parameters, after: Aftermath) -> None:
    """Starts the same run again while it is alive: the second must be refused, and the first must be unaffected."""
    code, said = run.beside(resume=parameters["resume"])
    after.observed["rival"] = code
    if code != _REFUSED:
        last = " / ".join(said.strip().splitlines()[-2:])
        after.complaints.append(
            f"a second run on the same directory ended with {code}, and not {_REFUSED}: {last[-300:]}"
        )
    elif "swift: " not in said or "Traceback" in said:
        after.complaints.append("a second run on the same directory was not told why in one line")
    after.wants_checkpoint = True


KINDS = [
    *(Kind(what, _damage, _draw(what), ends=True, is_quiet=True) for what in _TARGETS),
    Kind("rival", _rival, lambda rng, _: {"resume": rng.random() < 0.8}, is_quiet=True),
]
