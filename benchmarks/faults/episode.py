"""Episode: the life of one run directory, with volleys of faults, each of which is judged."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from . import evidence, judge
from .kinds import Aftermath, Kind
from .running import Hung, Run
from .shapes import EVERY, LATE_SERVICE_S, NUM_STEPS
from .volleys import Deck, Fault, wait_for_moment

_STEPS_AFTER = 3
"""Iterations that all processes must run together before a run counts as well."""
_LAST_STEPS = 3 * EVERY
_NEIGHBOURS = 2
"""Number of expert ranks whose simultaneous loss loses updates: each holds its neighbour's newest copy."""
_ENDING_S = 60.0
_REFUSED = (2, judge.GIVES_UP)
"""Exit codes of a run that is refused, with a message."""


@dataclass(frozen=True)
class Verdict:
    """Result of a volley.

    Attributes:
        faults: faults that struck.
        complaints: faults of the run; empty if there are none.
        seconds: time until the run was well again, or the judge gave up.
        observed: observations for the record.
        losses: losses of iterations recorded, or recorded again, since the previous volley.
        excused: iterations whose records were damaged.
    """

    faults: Sequence[Fault]
    complaints: Sequence[str]
    seconds: float
    observed: Mapping[str, Any]
    losses: Mapping[int, float] = field(default_factory=dict)
    excused: frozenset[int] = frozenset()

    def held_against(self, expected: Mapping[int, float]) -> Self:
        """Adds complaints about its losses, once those of the run without faults are known."""
        complaints = judge.of_losses(self.losses, expected, self.excused)
        return replace(self, complaints=[*self.complaints, *complaints])


class Episode:
    """Volleys upon one run.

    Args:
        run: run to start.
        kinds: kinds of faults by name.
        deck: source of volleys.
        is_early: True if faults strike before there is a checkpoint.
    """

    def __init__(self, run: Run, kinds: Mapping[str, Kind], deck: Deck, *, is_early: bool = False):
        self._run, self._kinds, self._deck = run, kinds, deck
        self._excused, self._is_early, self._seen = set[int](), is_early, dict[int, float]()
        self._kept: int | None = None  # the newest promise, in case its record is damaged
        self._exact_until: int | None = None  # the iteration after which updates are lost

    def volleys(self, most: int, is_called_off: Callable[[], bool]) -> Iterator[Verdict]:
        """Strikes and judges until the run has ended, enough volleys have struck, none is left, or something was wrong.

        The start and the end of the run are judged, too, as volleys of no faults.
        """
        run = self._run
        run.start(resume=False)
        verdict = self._judged([], self._begin)
        yield verdict
        while not verdict.complaints and most > 0 and not run.is_over() and not is_called_off():
            if self._exact_until is not None:
                return  # losses show nothing more from here on
            most -= 1
            if run.newest_step() > NUM_STEPS - _LAST_STEPS:
                verdict = self._judged([], self._finish)
            else:
                faults = self._deck.volley(run)
                if not faults:
                    return
                verdict = self._judged(faults, lambda after: self._strike(faults, after))  # noqa: B023
            yield verdict

    def _judged(self, faults: Sequence[Fault], do: Callable[[Aftermath], None]) -> Verdict:
        begun, after = time.monotonic(), Aftermath()
        self._run.meanwhile = after.heal_due
        try:
            do(after)
        except Hung as error:
            after.complaints.append(f"hangs: {error}")
        finally:
            after.heal_due(now=True)
            for heal in after.later:
                heal()
        seconds = round(time.monotonic() - begun, 2)
        self._excused |= after.excused
        found = evidence.losses(self._run.run_dir)
        last = self._exact_until or NUM_STEPS
        news = {step: loss for step, loss in found.items() if self._seen.get(step) != loss and step <= last}
        self._seen |= news
        after.complaints += judge.of_gaps(found, self._excused)
        if self._run.life.first.returncode == 0 and len(found.keys() - self._excused) < NUM_STEPS - len(self._excused):
            after.complaints.append(f"exit code 0 after {len(found)} of {NUM_STEPS} iterations")
        for life in self._run.lives[-2:]:
            after.complaints += judge.of_terminal(life.said)
        observed = {"step": max(found, default=0), **after.observed}
        return Verdict(faults, after.complaints, seconds, observed, news, frozenset(self._excused))

    def _begin(self, after: Aftermath) -> None:
        """Waits for the first iterations, or the first checkpoint, after which most faults are of interest."""
        run, last = self._run, _STEPS_AFTER if self._is_early else EVERY

        def has_begun() -> bool:
            return run.newest_step() >= last and (self._is_early or self._promised() is not None)

        if not run.wait(has_begun, "it does not begin"):
            after.complaints += judge.of_exit(self._run.life.first.wait(), (), self._run.life.said)

    def _finish(self, after: Aftermath) -> None:
        """Lets the run finish."""
        self._run.wait(self._run.is_over, "the run does not come to its end")
        self._end(after, {0})

    def _strike(self, faults: Sequence[Fault], after: Aftermath) -> None:
        run, known, promised = self._run, len(self._run.events()), self._promised()
        after.observed |= {"promised": promised, "moments": []}
        for fault in faults:
            after.observed["moments"].append(wait_for_moment(run, fault))
            if run.is_over():
                break
            self._kinds[fault.kind].strike(run, fault.parameters, after)
            after.heal_due()
        while after.heals and not run.is_over():
            after.heal_due()
            time.sleep(0.02)
        if not after.has_ended and self._is_well_again(known, after):
            self._judge_restores(known, promised, after)
        else:
            self._judge_reshards(run.events()[known:], after)  # by a fault before that which ended it
            gives_up = {judge.GIVES_UP} if promised is None else set()
            self._end(after, after.codes | gives_up | {0})
            if run.life.first.returncode != 0:
                self._resume(known, after)

    def _is_well_again(self, known: int, after: Aftermath) -> bool:
        """Waits until all processes have run some iterations together; False if the life has ended."""
        run = self._run
        if not run.wait(lambda: run.is_well(known, after.dead), f"not all run again after {after.dead or 'the fault'}"):
            return False
        step, events = run.newest_step(), len(run.events())
        last = min(step + _STEPS_AFTER, NUM_STEPS)
        if not run.wait(lambda: run.newest_step() >= last, f"no iteration after {step} is done"):
            return False
        for is_so, what in after.awaited:
            if not run.wait(is_so, what):
                return False
        if not after.wants_checkpoint or step + EVERY >= NUM_STEPS:
            return True
        return run.wait(
            lambda: any(event["event"] == "checkpoint" for event in run.events()[events:]),
            "no checkpoint is saved again",
            run.place.patience_s + LATE_SERVICE_S,
        )

    def _judge_restores(self, known: int, promised: int | None, after: Aftermath) -> None:
        """Checks that the run went back only where necessary, and no further than to its promise."""
        told = self._run.events()[known:]
        restores = [event for event in told if event["event"] == "restore"]
        if self._loses_updates(restores, after):
            after.complaints.append("updates were lost though no checkpoint was damaged")
        else:
            self._judge_reshards(told, after)
        for event in restores:
            after.complaints += judge.of_restore(event, promised, after.may_be_older)
        if restores:
            after.observed["restored"] = [event["step"] for event in restores]
            is_elastic = self._run.shape.is_elastic and after.dead
            if not (is_elastic or after.may_lose_states or self._is_a_stage_lost(after.lost(told))):
                after.complaints.append(f"went back to iteration {restores[0]['step']} though every stage had a worker")

    def _judge_reshards(self, told: list[dict[str, Any]], after: Aftermath) -> None:
        """Checks that updates were lost with neighbouring ranks only."""
        reshards = [event for event in told if event["event"] == "reshard"]
        may_lose = after.may_lose_states or len(after.lost(told)) >= _NEIGHBOURS
        if self._loses_updates(reshards, after) and not may_lose:
            after.complaints.append("updates were lost though the neighbour of each lost rank was there")

    def _loses_updates(self, told: list[dict[str, Any]], after: Aftermath) -> bool:
        """Returns whether the run has reported that it lost updates: then losses show nothing more."""
        found = evidence.lost_updates_at(told)
        if found is not None:
            self._exact_until = found if self._exact_until is None else min(found, self._exact_until)
            after.observed["lost_updates_at"] = self._exact_until
        return found is not None

    def _is_a_stage_lost(self, lost: set[str]) -> bool:
        """Returns whether some stage has no other members than those that are lost."""
        shape = self._run.shape
        return any(all(m in lost for m in shape.members if shape.stage_of(m) == shape.stage_of(one)) for one in lost)

    def _end(self, after: Aftermath, codes: set[int]) -> None:
        """Waits for the end of the life and judges it."""
        run = self._run
        run.wait(run.is_over, "the run has not ended", _ENDING_S)
        after.heal_due(now=True)
        run.finish_stopped()
        code, said = run.life.first.wait(), run.life.said
        after.observed["code"] = code
        after.complaints += judge.of_exit(code, judge.codes_of_end(codes, self._is_record_damaged()), said)
        if after.may_leave or (code == -signal.SIGKILL and set(run.shape.members) <= set(after.dead)):
            run.clear()  # with the first process and all members nobody was left to remove files
            run.sweep()
        after.complaints += [f"left behind: {one}" for one in run.leftovers()]

    def _is_record_damaged(self) -> bool:
        return evidence.is_record_damaged(self._run.run_dir)

    def _promised(self) -> int | None:
        """Iteration of the newest checkpoint that the run has reported."""
        told = evidence.promised(self._run.events())
        self._kept = self._kept if told is None else told
        return self._kept

    def _begin_anew(self, after: Aftermath) -> None:
        """Checks that a run without a checkpoint reports that, and starts another run."""
        run = self._run
        run.start(resume=True)
        run.wait(run.is_over, "it is resumed from no checkpoint")
        after.complaints += judge.of_exit(run.life.first.wait(), {2}, run.life.said)
        shutil.rmtree(run.run_dir)
        self._excused.clear()
        self._kept = None
        run.start(resume=False)
        self._begin(after)

    def _resume(self, known: int, after: Aftermath) -> None:
        """Restarts the run, which has to resume from its promise."""
        run, promised = self._run, after.promised or self._promised()
        if promised is None and not evidence.checkpoints_there(run.run_dir):
            self._begin_anew(after)
            return
        # What a stage had done since the promise went with its last worker, if all were hit before the signal.
        lost = after.lost(run.events()[known:])
        is_without_copies = bool(lost) and after.may_lose_states
        has_lost_neighbours = run.shape.is_elastic and len(lost) >= _NEIGHBOURS
        has_aborted = after.observed.get("code") == -signal.SIGABRT
        may_have_lost = has_aborted or is_without_copies or has_lost_neighbours or self._is_a_stage_lost(lost)
        step = after.observed.get("step_at_signal")
        if step is not None and (promised or 0) < step and not may_have_lost:
            after.complaints.append(
                f"the last whole iteration, {step}, was not kept: the newest checkpoint is {promised}"
            )
        resumes = _count_resumes(run)
        run.start(resume=True)
        if not run.wait(lambda: _has_resumed(run, resumes), "it is not resumed"):
            code, said = run.life.first.wait(), run.life.said
            after.observed["resume_code"] = code
            after.complaints += judge.of_exit(code, _REFUSED if after.undo else (), said)
            after.complaints += [f"left behind: {one}" for one in run.leftovers()]
            if after.complaints or after.undo is None:
                return
            after.undo()
            run.start(resume=True)
            if not run.wait(lambda: _has_resumed(run, resumes), "it is not resumed after repair"):
                after.complaints += judge.of_exit(run.life.first.wait(), (), run.life.said)
                return
        resumed = next(event for event in reversed(run.events()) if event["event"] == "resume")
        after.observed["resumed"] = self._kept = resumed["step"]
        after.complaints += judge.of_restore(resumed, promised, after.may_be_older)
        if not self._is_well_again(len(run.events()), Aftermath()):
            codes = judge.codes_of_end({0}, self._is_record_damaged())
            after.complaints += judge.of_exit(run.life.first.wait(), codes, run.life.said)
        restores = [event for event in run.events() if event["event"] == "restore"]  # `train` tells its own first
        if self._loses_updates(restores[-1:], after) and not after.may_be_older:
            after.complaints.append("updates were lost though no checkpoint was damaged")


def _count_resumes(run: Run) -> int:
    return sum(event["event"] == "resume" for event in run.events())


def _has_resumed(run: Run, known: int) -> bool:
    return _count_resumes(run) > known
