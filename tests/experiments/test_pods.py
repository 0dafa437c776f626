"""Reports of real compilations that are kept: whole, equal to the closed form, and of these settings and sizes.

The closed form is written out again here. What it takes from the project is the experiment that a report names and the
sizes of the model's parameters: where they change, the reports are out of date, and their commands make them again.
"""

import json
import math
import shlex
from pathlib import Path

import pytest

from swift.cli.options import command_line
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_experiment
from swift.models.gpt import GPT
from swift.pod_compile.compile import compile_one
from swift.pod_compile.pods import Pod
from swift.train.emulated import FailedSet

PODS = Path(__file__).parents[2] / "experiments" / "pods"
RESULTS = sorted((PODS / "results").glob("*.json"))
CONFIGURATIONS = [
    pytest.param(path, number, id=f"{path.stem} {'+'.join(report['failed']) or 'all live'}")
    for path in RESULTS
    for number, report in enumerate(json.loads(path.read_text())["configurations"])
]
SMALL = ["ModelConfig.num_layers=2", "ModelConfig.model_dim=16", "ModelConfig.num_heads=2", "ModelConfig.ffn_dim=24"]
SMALL += ["ModelConfig.sequence_length=16", "Experiment.sequences_per_microbatch=16", "ExpertConfig.num_classes=4"]
NUM_BYTES = {"bfloat16": 2, "float32": 4}


def wanted_bytes(experiment: Experiment, failed: frozenset) -> tuple[dict[str, int], int]:
    """Bytes of the exchange by group of parameters, and of tokens, in an iteration (SYMI, section 3)."""
    topology, experts, model = experiment.topology, experiment.experts, experiment.model
    ranks, num_bytes = topology.num_expert_ranks, NUM_BYTES[experiment.compute_dtype]
    live = [worker for worker in topology.workers if worker not in failed]
    first, last = (sum(stage == end for _, stage in live) for end in (0, topology.num_stages - 1))
    exchange = {}
    vocab_size = model.vocab_size or experiment.data.vocab_size
    for name, group in GPT(model, vocab_size, experts.num_classes).groups.items():
        rows = {"embedding": first, "head": last}.get(name, len(live))
        # A worker has, and exchanges, as many layers as the longest stage.
        of_stage = group.num_layers // topology.num_stages if experiment.cut is None else max(experiment.cut)
        layers = 1 if name in ("embedding", "head") else of_stage
        slots = experts.slots_per_rank if group.is_expert else 1
        size = math.ceil(group.size / ranks) * ranks
        if name == "embedding" and experiment.embedding == "sharded":
            size = 0  # rows do not move, and with rotary positions there is nothing else
        if name == "head" and experiment.head == "sharded":
            size = ranks * head_message(group.size, vocab_size, ranks)
        exchange[name] = rows * layers * 2 * slots * ranks * size * num_bytes * (ranks > 1)  # one has nobody to send to
    tokens_of_rank = experiment.sequences_per_microbatch // ranks * model.sequence_length
    slots = experts.slots_per_rank * ranks
    rows_of_slot = math.ceil(experts.capacity.factor * tokens_of_rank * experts.top_k / slots)
    microbatches = experiment.num_microbatches * topology.num_pipelines
    rows = sum(model.moe_layers) * microbatches * ranks * slots * rows_of_slot
    return exchange, 4 * rows * model.model_dim * num_bytes * (ranks > 1)


def head_message(size: int, vocab_size: int, ranks: int) -> int:
    """Numbers that a rank sends each other of a sharded head: the norm, and a share of the rows that a slice has."""
    of_norm, width = size % vocab_size, math.ceil(size / ranks)
    starts = [rank * width - of_norm for rank in range(ranks)]
    rows = max((start + width - 1) // vocab_size - start // vocab_size + 1 for start in starts)
    return of_norm + rows * math.ceil(vocab_size / ranks)


def assert_equal_to_the_byte(report: dict, experiment: Experiment) -> None:
    failed = frozenset(tuple(map(int, worker.split(":"))) for worker in report["failed"])
    exchange, tokens = wanted_bytes(experiment, failed)
    for kind in ("formula_bytes", "compiled_bytes"):
        assert {name: group[kind] for name, group in report["exchange"]["groups"].items()} == exchange
        assert report["exchange"][kind] == sum(exchange.values())
        assert report["tokens"][kind] == tokens
    for shares in ("embedding", "head"):
        assert (shares in report) == (getattr(experiment, shares) == "sharded")
        found = report.get(shares, {"compiled_bytes": 0, "formula_bytes": 0})
        assert found["compiled_bytes"] == found["formula_bytes"]


@pytest.mark.parametrize(("path", "number"), CONFIGURATIONS)
def test_what_a_compiled_step_exchanges_is_the_closed_form(path, number):
    facts = json.loads(path.read_text())
    report = facts["configurations"][number]
    program, options = shlex.split(facts["command"])[:3], command_line().parse_args(shlex.split(facts["command"])[3:])
    assert program == ["python", "-m", "swift"]
    assert options.topology == facts["topology"]["name"]
    assert_equal_to_the_byte(report, load_experiment(PODS.parents[1] / options.config, options.set))
    assert report["result"] == "fits", report
    assert report["memory"]["needed_bytes"] <= report["memory"]["capacity_bytes"]


def compiled(config: str, pod: str, failed: frozenset, *settings: str) -> tuple[Experiment, dict]:
    """An experiment with a small model, and its report for a pod."""
    experiment = load_experiment(PODS / config, [*SMALL, *settings])
    return experiment, compile_one(experiment, Pod.parse(pod), FailedSet(failed, frozenset()))


def test_a_step_compiled_now_exchanges_the_closed_form():
    # float32, since XLA:CPU exchanges it where bfloat16 is asked for
    experiment, report = compiled("h100_1x8.gin", "cpu:8", frozenset(), "Experiment.compute_dtype='float32'")
    assert_equal_to_the_byte(report, experiment)


@pytest.mark.slow
@pytest.mark.parametrize("failed", [frozenset(), frozenset({(1, 2)})], ids=["all live", "1:2 down"])
def test_a_step_compiled_now_for_16_v5e_exchanges_the_closed_form(failed):
    pytest.importorskip("libtpu")
    experiment, report = compiled(
        "v5e_4x4.gin",
        "v5e:4x4",
        failed,
        "Experiment.num_microbatches=2",
        "ModelConfig.num_layers=4",
        "ModelConfig.moe_pattern=(True,)",
    )
    assert_equal_to_the_byte(report, experiment)


def test_every_result_is_tabulated():
    table = (PODS / "README.md").read_text()
    for path in RESULTS:
        for report in json.loads(path.read_text())["configurations"]:
            figures = f"{report['exchange']['compiled_bytes'] / 1e6:,.3f}", f"{report['predicted']['step_ms']:.1f}"
            assert all(f" {figure} |" in table for figure in figures), (path.name, report["failed"])
