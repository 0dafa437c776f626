"""The judge of the campaign finds what is wrong, and nothing else."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from faults import evidence, judge
from faults.campaign import KINDS
from faults.episode import Episode
from faults.kinds import Aftermath
from faults.running import Life, Run
from faults.shapes import SHAPES

EXPECTED = {step: 1.0 / step for step in range(1, 11)}


def test_losses_of_the_run_without_faults_are_right():
    found = {step: loss * (1 + 1e-12) for step, loss in EXPECTED.items() if step < 8}
    assert judge.of_losses(found, EXPECTED) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({4: 0.25 * (1 + 1e-7)}, "1 losses are wrong, the first that of iteration 4"),
        ({4: None}, "1 losses are wrong"),
        ({11: 0.1}, "the first that of iteration 11"),
    ],
)
def test_a_wrong_loss_is_found(change, complaint):
    assert any(complaint in found for found in judge.of_losses(EXPECTED | change, EXPECTED))
    assert judge.of_losses(EXPECTED | change, EXPECTED, excused=change) == []


def test_a_missing_iteration_is_found():
    found = {step: loss for step, loss in EXPECTED.items() if step != 3}
    assert judge.of_gaps(found) == ["1 iterations are not recorded, the first 3"]
    assert judge.of_gaps(found, excused=[3]) == judge.of_gaps(EXPECTED) == judge.of_gaps({}) == []


def test_an_exit_needs_a_right_code_and_a_sentence():
    assert judge.of_exit(3, {3}, "swift: the disk is full: stopped; go on with --resume") == []
    assert judge.of_exit(3, {3}, "") == ["exit code 3 without a sentence that says why"]
    (complaint,) = judge.of_exit(1, {0, 3}, "one\ntwo\nthree\nfour")
    assert complaint == "exit code 1, and not 0 or 3: two / three / four"


def test_a_run_that_ends_with_a_damaged_record_does_not_succeed():
    assert judge.codes_of_end({0, -9}, is_record_damaged=True) == {3, -9}
    assert judge.codes_of_end({0, -9}, is_record_damaged=False) == {0, -9}
    assert judge.codes_of_end({130}, is_record_damaged=True) == {130}


def test_a_traceback_is_found():
    assert judge.of_terminal("all is well") == []
    assert judge.of_terminal("Traceback (most recent call last):\n  ...\nKeyError: 1")[0].endswith("KeyError: 1")


@pytest.mark.parametrize(
    ("step", "may_be_older", "is_right"), [(40, False, True), (20, False, False), (20, True, True)]
)
def test_what_is_restored_is_held_against_what_was_promised(step, may_be_older, is_right):
    found = judge.of_restore({"event": "resume", "step": step}, 40, may_be_older=may_be_older)
    assert (found == []) is is_right


def test_a_promise_is_the_newest_checkpoint_that_was_not_gone_back_behind():
    told = [
        {"event": name, "step": step} for name, step in [("checkpoint", 20), ("checkpoint", 40), ("process_died", 50)]
    ]
    assert evidence.promised([]) is None
    assert evidence.promised(told) == 40
    assert evidence.promised([*told, {"event": "restore", "step": 20}]) == 20
    assert evidence.promised([*told, {"event": "restore", "step": 40}, {"event": "checkpoint", "step": 60}]) == 60


@pytest.mark.parametrize(("step", "lost_at"), [(185, None), (180, 185)])
def test_updates_are_lost_where_a_part_is_older(step, lost_at):
    source = {"rank": 0, "weights": {"source": "replica", "step": 185}, "moments": {"source": "storage", "step": step}}
    told = [{"event": "reshard", "step": 170}, {"event": "reshard", "step": 185, "sources": [source]}]
    assert evidence.lost_updates_at(told) == lost_at


@pytest.mark.parametrize(
    ("experts", "lost_at"), [({"240": "all"}, None), ({"240": [[0, 1], [1, 0], [1, 1]], "220": [[0, 0]]}, 240)]
)
def test_updates_are_lost_where_an_expert_is_older(experts, lost_at):
    """A restore passes over a damaged copy of an expert, for the one before it."""
    assert evidence.lost_updates_at([{"event": "restore", "step": 240, "experts": experts}]) == lost_at


def test_lines_that_are_damaged_are_told_and_a_torn_one_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps({"step": 1, "loss": 2.0}).encode() + b'\n{"step": \xff\n{"step": 3}\n{"st')
    assert evidence.read_lines(path) == evidence.Lines([{"step": 1, "loss": 2.0}, {"step": 3}], [2])
    assert evidence.losses(tmp_path) == {1: 2.0}


def test_a_disk_that_fails_hides_no_event_that_was_read(tmp_path, monkeypatch):
    run = object.__new__(Run)
    run.run_dir, run._told = tmp_path, []
    (tmp_path / "events.jsonl").write_text('{"event": "process_died"}\n')
    told = run.events()
    assert told == [{"event": "process_died"}]
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    assert run.events() == told


def test_updates_that_a_run_lost_before_a_fault_ended_it_are_known(tmp_path):
    """Two neighbours are killed, older copies replace theirs, then the run is stopped: losses show nothing after."""
    source = {"weights": {"source": "replica", "step": 681}, "moments": {"source": "storage", "step": 680}}
    told = []
    life = SimpleNamespace(first=SimpleNamespace(returncode=0, wait=lambda: 0), said="")
    run = SimpleNamespace(
        events=lambda: told, shape=SHAPES["ranks"], life=life, run_dir=tmp_path, wait=lambda *_: True, leftovers=list,
        is_over=lambda: False, finish_stopped=lambda: None, newest_step=lambda: 700,
    )  # fmt: skip
    episode = Episode(run, {"stop": SimpleNamespace(strike=stop_after(told, source))}, deck=None)
    episode._is_record_damaged = lambda: False
    after = Aftermath()
    episode._strike([SimpleNamespace(kind="stop", parameters={}, moment="now", delay_s=0.0)], after)
    assert after.complaints == []
    assert after.observed["lost_updates_at"] == episode._exact_until == 681


def stop_after(told, source):
    def strike(_, __, after):
        told.append({"event": "reshard", "step": 681, "sources": [source]})
        after.dead, after.has_ended = ["0:0", "0:0 rank 1"], True

    return strike


RESTORE = {"event": "restore", "step": 620, "dense": 620, "experts": {"620": "all"}}


def deaths(*names):
    return [{"event": "process_died", "process": name} for name in names]


@pytest.mark.parametrize("kind", ["cut-wire", "kill-node", "pause-node"])
@pytest.mark.parametrize(
    ("killed", "told", "is_right"),
    [
        (["0:0", "0:1"], ["0:0", "0:1", "1:0", "1:1"], True),
        (["0:1"], ["0:1", "1:1"], True),
        (["0:0", "0:1"], ["0:0", "0:1"], False),  # the wire was mended in time
        (["0:1"], ["0:1", "1:0"], False),
        ([], ["1:0", "1:1"], False),
    ],
)
def test_a_run_goes_back_where_the_last_workers_of_a_stage_died_out_of_reach(kind, killed, told, is_right):
    """The second machine of two has pipeline 1."""
    events, node = [*deaths(*told), RESTORE], SimpleNamespace(pid=1, wait=lambda: None)
    life = SimpleNamespace(nodes=[None, node], first=SimpleNamespace(returncode=0))
    run = SimpleNamespace(shape=SHAPES["nodes"], events=lambda: events, life=life, start_missing_nodes=lambda: None)
    run.network = SimpleNamespace(say=lambda _: None)
    after = Aftermath(dead=killed)
    with mock.patch("faults.blows_nodes.send"):
        KINDS[kind].strike(run, {"delay_s": 0.0, "cut": [0, 1], "lost": 0.0, "seconds": 9.0}, after)
    Episode(run, {}, deck=None)._judge_restores(0, 600, after)
    assert (after.complaints == []) is is_right


@pytest.mark.parametrize("may_lose_states", [False, True])
def test_a_run_without_its_states_in_memory_may_go_back_at_any_death(may_lose_states):
    run = SimpleNamespace(shape=SHAPES["square"], events=lambda: [*deaths("0:0"), RESTORE])
    after = Aftermath(dead=["0:0"], may_lose_states=may_lose_states)
    Episode(run, {}, deck=None)._judge_restores(0, 600, after)
    assert (after.complaints == []) is may_lose_states


@pytest.mark.parametrize(("dead", "is_right"), [(["0:1", "1:1"], True), (["0:1"], False)])
def test_a_run_goes_back_where_processes_died_that_could_start_no_thread(dead, is_right):
    run = SimpleNamespace(shape=SHAPES["square"], events=lambda: [*deaths(*dead), RESTORE])
    run.tasks = SimpleNamespace(leave=lambda _: None, lift=lambda: None)
    after = Aftermath()
    KINDS["few-tasks"].strike(run, {"left": 0, "seconds": 1.0}, after)
    assert after.codes == {3, -signal.SIGABRT}
    Episode(run, {}, deck=None)._judge_restores(0, 600, after)
    assert (after.complaints == []) is is_right


@pytest.mark.parametrize(("code", "is_right"), [(-signal.SIGABRT, True), (3, False), (130, False)])
def test_a_run_that_aborts_without_threads_may_lose_what_it_had_not_saved(code, is_right):
    life = SimpleNamespace(first=SimpleNamespace(wait=lambda: 0), said="")
    run = SimpleNamespace(shape=SHAPES["train"], events=list, life=life, leftovers=list)
    run.start, run.wait = lambda **_: None, lambda *_: False
    after = Aftermath(promised=600, observed={"step_at_signal": 640, "code": code})
    Episode(run, {}, deck=None)._resume(0, after)
    assert any("was not kept" in one for one in after.complaints) is not is_right


@pytest.mark.parametrize("code", [130, 3, -signal.SIGKILL, -signal.SIGABRT])
def test_files_that_machines_share_may_stay_where_their_first_process_could_not_remove_them(code, tmp_path):
    run = Run(SimpleNamespace(corpus=tmp_path), SHAPES["nodes"], tmp_path, tmp_path / "run")
    first = SimpleNamespace(returncode=code, pid=1)
    run.lives.append(Life(0, [first], terminal=None))
    shared = run.run_dir / ".swift-1-x"
    shared.mkdir(parents=True)
    assert run.leftovers(patience_s=0.0) == ([str(shared)] if code in (130, 3) else [])


@pytest.mark.parametrize(("told", "is_right"), [(["1:1"], True), ([], False)])
def test_iterations_may_be_lost_where_the_last_workers_of_a_stage_died_out_of_reach(told, is_right):
    life = SimpleNamespace(first=SimpleNamespace(wait=lambda: 0), said="")
    run = SimpleNamespace(shape=SHAPES["nodes"], events=lambda: deaths("0:1", *told), life=life)
    run.start = lambda resume: run.__setattr__("was_resumed", resume)
    run.wait = lambda *_: False
    run.leftovers = list
    after = Aftermath(dead=["0:1"], out_of_reach={"1:0", "1:1"}, promised=600, observed={"step_at_signal": 640})
    Episode(run, {}, deck=None)._resume(0, after)
    assert any("was not kept" in one for one in after.complaints) is not is_right
    assert run.was_resumed
