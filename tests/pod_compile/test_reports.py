"""Reports of programs that were really compiled, for CPU: bytes beside the closed forms, written out again here."""

import json
import math
from dataclasses import replace

import jax
import pytest

from swift.errors import SettingError
from swift.experts.config import ExactCapacity, ExpertConfig
from swift.pod_compile.compile import FITS, REFUSED, TOO_LARGE, _compiled, check_pod, compile_one, configurations
from swift.pod_compile.json_format import document, text_lines
from swift.pod_compile.pods import Pod
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.emulated import FailedSet
from tests.pod_compile.conftest import NOBODY, experiment


def padded(size: int, ranks: int) -> int:
    return math.ceil(size / ranks) * ranks


def test_exchange_of_a_lone_worker(lone):
    one, report = lone
    groups = make_step_spec(one).gpt.groups.values()
    slots = [3 if group.is_expert else 1 for group in groups]
    wanted = sum(2 * g.num_layers * s * 4 * padded(g.size, 4) * 4 for g, s in zip(groups, slots, strict=True))
    assert report["exchange"]["compiled_bytes"] == report["exchange"]["formula_bytes"] == wanted
    # 4 ways, 3 micro-batches, 1 layer, 4 ranks, 12 slots of ceil(16 tokens / 12) rows of 16 numbers.
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"] == 4 * 3 * 4 * 12 * 2 * 16 * 4


def test_with_exact_capacity_weights_travel_with_the_tokens():
    one = experiment(Topology(num_expert_ranks=2), num_microbatches=3)
    one = replace(one, experts=ExpertConfig(4, 3, top_k=3, capacity=ExactCapacity()))
    report, size = compile_one(one, Pod.parse("cpu:2"), NOBODY), make_step_spec(one).gpt.groups["expert"].size
    # 3 micro-batches, 1 layer, 2 ranks: 16 tokens of 16 numbers to each, there and back, forward and backward; and the
    # weights of 3 slots, again for the backward pass, and their gradients.
    wanted = 3 * 2 * (4 * 2 * 16 * 16 + 3 * 3 * padded(size, 2)) * 4
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"] == wanted
    experts = report["exchange"]["groups"]["expert"]
    assert experts["compiled_bytes"] == experts["formula_bytes"] == 0
    assert report["exchange"]["compiled_bytes"] == report["exchange"]["formula_bytes"] > 0


@pytest.mark.slow
def test_exchange_of_a_pipeline_that_has_lost_a_worker(pipelines):
    one, report = pipelines
    groups = make_step_spec(one).gpt.groups
    # 5 workers, 3 of the first stage and 2 of the last; gradients in bfloat16, weights in float32.
    rows = {"embedding": 3, "head": 2}
    wanted = {
        name: rows.get(name, 5)
        * (1 if name in rows else group.num_layers // 2)
        * (3 if group.is_expert else 1)
        * 2
        * padded(group.size, 2)
        * (2 + 4)
        for name, group in groups.items()
    }
    assert {name: group["formula_bytes"] for name, group in report["exchange"]["groups"].items()} == wanted
    compiled = {name: group["compiled_bytes"] for name, group in report["exchange"]["groups"].items()}
    assert compiled.keys() == wanted.keys()
    # XLA:CPU exchanges float32 where bfloat16 was asked for; where the CPU computes in bfloat16, for some groups.
    assert all(compiled[name] in (num_bytes, num_bytes * 8 // 6) for name, num_bytes in wanted.items())
    assert report["tokens"]["compiled_bytes"] == report["tokens"]["formula_bytes"] == 4 * 2 * 6 * 2 * 6 * 3 * 16 * 4


def test_runs_in_an_iteration_follow_the_table(pipelines):
    _, report = pipelines
    assert (report["program"], report["iterations"], report["devices"]) == ("window", 2, 10)
    # Every one of the 6 micro-batches goes from the first stage to the second and back, on 2 ranks.
    message = 2 * 8 * 16 * 4
    assert report["collectives"]["collective-permute"]["bytes"] >= 6 * 2 * 2 * message
    assert report["collectives"].keys() >= {"all-reduce", "all-to-all", "collective-permute"}


def test_flops_do_not_depend_on_who_runs_them(lone):
    """6 for each parameter that a token meets, 12 T D for attention in each layer, 2 V D for embedding gradients."""
    one, report = lone
    gpt = make_step_spec(one).gpt
    met = [group for name, group in gpt.groups.items() if name not in ("embedding", "expert")]
    dense = sum(group.num_layers * group.size for group in met)
    slots_rows = 3 * 4 * 4 * 2 * 3  # slots, ranks, sources, rows of a source, micro-batches
    tokens = 3 * 8 * 8
    experts = 6 * slots_rows * gpt.groups["expert"].size
    wanted = 6 * tokens * dense + 2 * 12 * 8 * 16 * tokens + experts + 2 * tokens * gpt.vocab_size * 16
    assert report["flops"] == pytest.approx(wanted, rel=0.01)


def test_a_document_is_json_and_reads_as_text(lone, pipelines):
    one, report = pipelines
    facts = json.loads(json.dumps(document(one, Pod.parse("cpu:12"), [report, lone[1]])))
    assert [found["result"] for found in facts["configurations"]] == [FITS, FITS]
    text = "\n".join(text_lines(facts))
    assert "1:1 down" in text
    assert "collective-permute" in text
    assert facts["configurations"][0]["predicted"] is None


class Failing:
    """A program that cannot be compiled."""

    def __init__(self, message: str):
        self.message = message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "needed", "capacity"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.", 20.5, 15.75),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (480.00G) "
            "exceeds available HBM (95.74G).",
            480,
            95.74,
        ),
    ],
)
def test_too_little_memory_is_a_result(message, needed, capacity):
    told = _compiled(Failing(message), Pod.parse("v5e:4x4"))
    assert told["result"] == TOO_LARGE
    assert told["memory"] == {"needed_bytes": int(needed * 2**30), "capacity_bytes": int(capacity * 2**30)}


def test_any_other_trouble_of_a_compiler_is_told():
    told = _compiled(Failing("INTERNAL: RET_CHECK failure\n of 6 devices"), Pod.parse("v5e:4x4"))
    assert told == {"result": REFUSED, "reason": "INTERNAL: RET_CHECK failure of 6 devices"}


def test_a_pod_of_another_size_is_refused():
    with pytest.raises(SettingError, match=r"has 16 devices, and Topology's 1 x 1 x 4 .* make 4"):
        check_pod(experiment(Topology(num_expert_ranks=4)), Pod.parse("v5e:4x4"))


def test_configurations_are_those_of_a_run_and_their_neighbours():
    two = experiment(Topology(2, 2, 2), failures=("step 3: fail 0:1", "step 5: rejoin 0:1"))
    lost = FailedSet(frozenset({(0, 1)}), frozenset())
    assert configurations(two, None, near=False) == [NOBODY, lost]
    assert configurations(two, lost.workers, near=False) == [lost]
    near = configurations(two, frozenset(), near=True)
    assert near[0] == NOBODY
    assert sorted(map(sorted, (down.workers for down in near[1:]))) == [[worker] for worker in two.topology.workers]
    ranks = configurations(experiment(Topology(1, 1, 3)), None, near=True)
    assert [len(down.ranks) for down in ranks] == [0, 1]
    with pytest.raises(SettingError):
        configurations(two, frozenset({(0, 1), (1, 1)}), near=False)
