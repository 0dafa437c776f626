"""Hooks for the real runs of these tests, controlled by marks: files in the directory ``SWIFT_TEST``.

Python imports this first where ``PYTHONPATH`` has this directory.

- ``away``: names of processes that are not restarted.
- ``gate``: last iteration that is begun, but for the first of a generation and that before another is formed.
- ``pace``: seconds between two iterations, so that there are few in a long run.
- ``forgetful``: names of processes that do not find plans of other cuts.
- ``moment-0:0``: where process 0:0 kills processes, see ``ClusterState``; afterwards renamed to ``reached-0:0``.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARKS = Path(os.environ.get("SWIFT_TEST", ""))


def marked(name):
    """Text of a mark; empty if there is none."""
    with suppress(OSError):
        return (MARKS / name).read_text()
    return ""


def wrapped(owner, name, make):
    """Replaces a function of a class or module by what ``make`` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def mend_supervisor():
    from swift.elastic.coordinator.fault_injection import FaultInjection

    FaultInjection.keeps_down = lambda _, process, __: str(process) in marked("away").split()


class Moments:
    """Progress of a member into a generation, and what happens at a moment of it."""

    def __init__(self, who):
        self.who, self.kind, self.newest, self.kept = who, "", None, None

    @staticmethod
    def kind_of(form):
        """Kind of a generation: blocks move to survivors, or back as a process returns, or neither."""
        return "move" if form.cut else "return" if form.after is not None else ""

    def reach(self, phase, kind=None):
        """Kills whom the mark names, if this is where."""
        if not (text := marked(f"moment-{self.who}")):
            return
        moment = json.loads(text)
        if moment["phase"] != phase or moment["kind"] != (self.kind if kind is None else kind):
            return
        (MARKS / f"moment-{self.who}").rename(MARKS / f"reached-{self.who}")
        pids = [pid or os.getpid() for pid in moment["pids"]]
        if moment["delay_s"]:  # another process does it, whatever this one waits for
            command = f"sleep {moment['delay_s']}; kill -9 {' '.join(map(str, pids))}"
            os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
            return
        for pid in sorted(pids, key=os.getpid().__eq__):  # itself at last
            with suppress(ProcessLookupError):  # it has died before
                os.kill(pid, signal.SIGKILL)

    def around(self, owner, name, before=None, after=None, kind=None):
        """Reaches phases before and after a function; of the kind of the present generation, unless it is given."""

        def make(inner):
            def function(*arguments, **options):
                if before:
                    self.reach(before, kind)
                found = inner(*arguments, **options)
                if after:
                    self.reach(after, kind)
                return found

            return function

        wrapped(owner, name, make)

    def mend_member(self):
        """Adds the phases that are not just before or after a function; then these."""
        from swift.elastic.jax_group import JaxGroup
        from swift.elastic.state import store as shared_memory_store
        from swift.elastic.transport.messages import FormGroup
        from swift.elastic.worker import generation as generation_programs
        from swift.elastic.worker import worker
        from swift.elastic.worker.channel import CommandListener
        from swift.elastic.worker.generation import GenerationWorkers, RetainedStates
        from swift.pipeline.reconfigure.executables import ExecutableCache

        def taking(inner):
            def take(listener, command):
                if isinstance(command, FormGroup):
                    self.reach("form", self.kind_of(command.form))
                inner(listener, command)

            return take

        def joining(inner):
            def join(process, command):
                self.kind = self.kind_of(command.form)
                inner(process, command)

            return join

        def keeping(inner):
            def keep(states):
                self.newest = max(states.on_devices, default=None)
                inner(states)

            return keep

        def saving(inner):
            def save(store, stamp, *arguments):
                self.kept = stamp
                inner(store, stamp, *arguments)

            return save

        def writing(inner):
            def write_or_spill(path, temporary, write):
                def write_all(file):
                    write(file)
                    self.reach("newest written" if self.kept == self.newest else "older written")

                return inner(path, temporary, write_all)

            return write_or_spill

        def sharing(inner):
            def compiled_transfer(*arguments):
                share = inner(*arguments)

                def shared(state):
                    self.reach("share")
                    found = share(state)
                    self.reach("shared")
                    return found

                return shared

            return compiled_transfer

        def forgetting(inner):
            return (lambda *_: None) if self.who in marked("forgetful").split() else inner

        wrapped(CommandListener, "_take", taking)
        wrapped(worker.WorkerProcess, "_join_generation", joining)
        wrapped(RetainedStates, "keep", keeping)
        wrapped(shared_memory_store.SharedMemoryStore, "save", saving)
        wrapped(shared_memory_store, "write_or_spill", writing)
        wrapped(generation_programs, "compiled_transfer", sharing)
        self.around(generation_programs.ProgramPreloader, "_loaded", before="load", after="loaded ahead", kind="move")
        self.around(worker.WorkerProcess, "_leave", before="leave", after="left")
        self.around(CommandListener, "wait_to_enter", before="departed")
        self.around(worker.WorkerProcess, "_form_group", before="enter", after="loaded")
        self.around(JaxGroup, "_make_backend", before="connected", after="linked")
        self.around(CommandListener, "wait_to_start", before="formed")
        self.around(worker.WorkerProcess, "_restore_state", before="start", after="restored")
        self.around(GenerationWorkers, "end_window", before="iterated", after="running")
        wrapped(GenerationWorkers, "should_stop", at_gate)
        wrapped(ExecutableCache, "kept_value", forgetting)


def at_gate(inner):
    """Has a member wait between two iterations."""

    def should_stop(workers, done):
        generation = workers.generation

        def may_go_on():
            is_last = generation.commands.is_old(generation.number)
            return workers._is_first or is_last or done < int(marked("gate") or sys.maxsize)

        while not may_go_on():
            time.sleep(0.01)
        time.sleep(float(marked("pace") or 0))
        return inner(workers, done)

    return should_stop


if "SWIFT_TEST" in os.environ and "launch" in sys.orig_argv:
    mend_supervisor()
if "SWIFT_TEST" in os.environ and "worker" in sys.orig_argv:
    pipeline, stage, rank = sys.orig_argv[-3:]
    Moments(f"{pipeline}:{stage}" + (f" rank {rank}" if rank != "0" else "")).mend_member()
