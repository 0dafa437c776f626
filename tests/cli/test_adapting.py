"""`swift plan --adapt`: what a person and a program are told, and how a mistake is told."""

import json
from itertools import pairwise

import pytest

SOUND = "plan --pipelines 3 --stages 4 --microbatches 8 --blocks 16"
COMMAND = f"{SOUND} --fail 1:2 --adapt"


def document(tell, options):
    told = tell(*options.split(), "--format", "json")
    assert (told.code, told.err) == (0, ""), told
    return json.loads(told.out)


def test_a_program_gets_the_plan_and_what_moves(tell):
    facts = document(tell, f"{COMMAND} recut --block-bytes 2e9 --bandwidth 4e9")
    assert facts["adapt"] == "recut"
    assert set(facts["blocks_of_worker"]) == {f"{d}:{p}" for d in range(3) for p in range(4)} - {"1:2"}
    assert sum(facts["microbatches_of_pipeline"]) == 24
    assert facts["microbatches_of_pipeline"] == facts["num_microbatches"]
    assert facts["ideal_throughput"] == pytest.approx(11 / 12)
    # Without a failure the zero-bubble plan has no bubbles: 8 micro-batches of 3 ops.
    assert facts["throughput"] == pytest.approx(24 / facts["period"])
    assert facts["reroute_throughput"] < facts["throughput"] < facts["ideal_throughput"]
    lacked = 0
    for worker, (first, end) in facts["blocks_of_worker"].items():
        stage = int(worker[-1])
        lacked += len(set(range(first, end)) - set(range(4 * stage, 4 * stage + 4)))
    assert facts["moved_bytes"] == 2e9 * lacked
    assert 2e9 / 4e9 <= facts["move_s"] <= facts["moved_bytes"] / 4e9
    gain = 1 - facts["reroute_throughput"] / facts["throughput"]
    assert facts["pays_after_s"] == pytest.approx(2 * facts["move_s"] / gain)


def test_a_person_is_told_what_it_gains_and_when_it_pays(tell):
    told = tell(*COMMAND.split())
    assert (told.code, told.err) == (0, "")
    assert "adapted by recut: pipelines cut anew; micro-batches of the pipelines: " in told.out
    assert "of the zero-bubble plan's without a failure; re-routing 66.7 %, live workers 91.7 %" in told.out
    assert "the way back counted" in told.out
    assert "blocks by stage of pipeline 1: " in told.out


def test_in_a_v_every_worker_has_two_runs_of_blocks(tell):
    """The survivors of a pipeline hold the model's first and last blocks, and so on inwards."""
    facts = document(tell, f"{COMMAND} auto --solver v")
    assert facts["adapt"] == "recut"
    assert facts["throughput"] > 0.9 * facts["ideal_throughput"] > facts["reroute_throughput"]
    cut_anew = [runs for worker, runs in facts["blocks_of_worker"].items() if worker.startswith("1:")]
    ends = sorted(end for runs in cut_anew for end in runs)
    assert [len(runs) for runs in cut_anew] == [2, 2, 2]
    assert (ends[0][0], ends[-1][1]) == (0, 16)
    assert all(before[1] == after[0] for before, after in pairwise(ends))


def test_nothing_moves_for_a_downtime_that_is_over_before_it_pays(tell):
    facts = document(tell, f"{COMMAND} --downtime 1s")
    assert (facts["adapt"], facts["moved_bytes"], facts["pays_after_s"]) == ("reroute", 0, 0)
    assert facts["throughput"] == facts["reroute_throughput"]


REFUSED = {
    f"{COMMAND} rout": "--adapt = 'rout': did you mean reroute?",
    f"{SOUND} --adapt": "--adapt = 'auto': requires --fail, which lists the failed workers",
    f"{COMMAND} --cut 4,4,4,4 5,5,1,5 4,4,4,4": "--adapt = 'auto': chooses the cut of each pipeline: give --cut once, "
    "as it is without a failure",
    f"{SOUND.replace('8', '8,8,8')} --fail 1:2 --adapt": "--adapt = 'auto': chooses the micro-batches of each "
    "pipeline: give --microbatches once, as they are without a failure",
    f"{COMMAND} --store plans": "--adapt = 'auto': cannot go together with --store, which is for re-routing",
    f"{COMMAND} --prepare 1": "--adapt = 'auto': cannot go together with --prepare, which is for re-routing",
    f"{COMMAND} --solver milp": "--adapt = 'auto': plans with --solver adaptive, lockstep or v, not milp",
    f"{COMMAND} --block-bytes 0": "--block-bytes = 0.0: must be a number above 0",
    f"{COMMAND} --downtime soon": "--downtime = 'soon': must be a duration, such as 90s, 10m, 6h or 2d",
    f"{SOUND} --fail 1:2 --downtime 5m": "--downtime = '5m': needs --adapt",
    f"{COMMAND} --fail 0:2 2:2": "--fail = '1:2 0:2 2:2': stage 2 has no live worker: restore from a checkpoint",
    f"{SOUND} --fail 1:2 --fail 1:2": "--fail = '1:2': is given twice",
    f"{SOUND} --fail 1:2 --costs tB=1 tB=2": "--costs = 'tB=2': tB is given twice",
    f"{SOUND} --memory-limit inf": "--memory-limit = inf: is not a limit: leave the option out for none",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_costs_one_line(tell, command):
    told = tell(*command.split())
    assert (told.code, told.out, told.new) == (2, "", [])
    assert told.err == f"swift: {REFUSED[command]}\n"
