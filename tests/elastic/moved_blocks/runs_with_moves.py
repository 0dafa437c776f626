"""Runs of real processes whose blocks move: what kills them in the midst of it, and how they are watched."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swift.runlog.reading import read_run
from tests.elastic.runs import launched, left_behind, members, wait_for_steps

SMALL = {"ModelConfig__num_layers": 2, "ModelConfig__model_dim": 16, "ModelConfig__sequence_length": 16}
MOVING = {"Experiment__adapt": "recut", "Experiment__num_microbatches": 4}
HOOKS = Path(__file__).parent / "hooks"
LEAVING = ("form", "leave", "older written", "newest written", "left", "departed")
CONNECTING = ("enter", "connected", "linked", "loaded")
STARTING = ("formed", "start", "share", "shared", "restored", "iterated", "running")
PHASES = {
    "move": ("load", "loaded ahead", *LEAVING, *STARTING),
    "return": (*LEAVING, *CONNECTING, *STARTING),
}
"""From the first message of a move to the end of the first iteration after it: survivors stay connected."""
COMPILE_SERVICE = "compile-service"


@dataclass(frozen=True)
class Moment:
    """A moment of a move of blocks, and who dies there.

    Attributes:
        kind: ``move``: survivors take over blocks; ``return``: they give them back.
        phase: one of the ``PHASES`` of its kind.
        who: process that reaches it.
        dying: processes that are killed; it may be one of them, and the compile service.
        delay_s: how long after it they are killed, in seconds.
    """

    kind: str
    phase: str
    who: str
    dying: tuple[str, ...]
    delay_s: float = 0.0


class MovingRun:
    """A run under way, whose lines are read as they come.

    Args:
        config: its settings.
        process: its supervisor.
    """

    def __init__(self, config, process):
        self.config, self.process, self.marks, self.said = config, process, config.parent, []
        self._num_seen = 0
        threading.Thread(target=self.said.extend, args=(process.stderr,), daemon=True).start()

    def mark(self, name, text=""):
        """Sets a mark, see ``hooks``."""
        (self.marks / f".{name}").write_text(text)
        (self.marks / f".{name}").rename(self.marks / name)

    def events(self, *names, after=0):
        """The events of these names, of those after so many of all."""
        return [event for event in read_run(self.marks / "run").events[after:] if not names or event["event"] in names]

    @property
    def num_events(self):
        return len(self.events())

    def wait(self, is_there, what):
        """Waits until something is there, and returns it."""
        while not (found := is_there()):
            assert self.process.poll() is None, f"ended before {what}: {''.join(self.said)}"
            time.sleep(0.1)
        return found

    def wait_for_going_on(self, num_members, after, *names):
        """Waits, after so many events, until so many members run iterations: one of these events says so."""
        names = names or ("recovery", "rejoin", "recut")
        self.wait(
            lambda: [one for one in self.events(*names, after=after) if len(one["members"]) == num_members],
            f"{num_members} processes went on with {' or '.join(names)}",
        )

    def go_to(self, step, num_members, *names):
        """Opens the gate up to an iteration, and waits for all to get there, after one of these events."""
        self.mark("gate", str(step))
        self.wait_for_going_on(num_members, self._num_seen, *names)
        wait_for_steps(self.process, self.config, step)
        self._num_seen = self.num_events

    def kill(self, *dying):
        """Kills processes at once, and waits until that is known."""
        begun, pids = self.num_events, members(self.config)
        for who in dying:
            os.kill(pids[who], signal.SIGKILL)
        self.wait_for_deaths(dying, begun)

    def wait_for_deaths(self, dying, after):
        """Waits until all of these members have died, after so many events."""
        for who in dying:
            self.wait(
                lambda who=who: [one for one in self.events("process_died", after=after) if one["process"] == who],
                f"{who} died",
            )

    def arm(self, moment):
        """Has processes killed at a moment."""
        pids = members(self.config)
        services = {kind: pid for pid, kind in left_behind(self.config).items()}
        found = [services[who] if who == COMPILE_SERVICE else pids[who] for who in moment.dying if who != moment.who]
        if moment.who in moment.dying:
            found.append(0)  # itself, whatever its number is by then
        facts = {"kind": moment.kind, "phase": moment.phase, "delay_s": moment.delay_s, "pids": found}
        self.mark(f"moment-{moment.who}", json.dumps(facts))

    def wait_for_moment(self, moment, after):
        """Waits until a moment was reached, and those who were to die have died, after so many events."""
        reached = self.marks / f"reached-{moment.who}"
        self.wait(reached.exists, f"reached {moment}")
        reached.unlink()
        self.wait_for_deaths([who for who in moment.dying if who != COMPILE_SERVICE], after)

    def stop(self):
        """Ends the run, of which nothing may be left."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=120) == 130, "".join(self.said)
        assert left_behind(self.config) == {}
        assert "Traceback" not in "".join(self.said)


@contextmanager
def moving_run(config, *arguments, processes):
    """A run under way of so many processes, which does not outlive its test."""
    with launched(config, "--restarts", "1000", *arguments, processes=processes) as process:
        run = MovingRun(config, process)
        run.wait((config.parent / "run" / "metrics.jsonl").exists, "the first iteration")
        yield run
