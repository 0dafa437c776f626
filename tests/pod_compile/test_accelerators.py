"""Programs that are really compiled for TPU and GPU, where their compilers are installed."""

import importlib.util
import json

import pytest

from swift.cli.main import main

pytestmark = pytest.mark.slow

_SMALL = """
Experiment.model = @ModelConfig()
ModelConfig.num_layers = {layers}
ModelConfig.model_dim = {dim}
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = {ffn}
ModelConfig.sequence_length = 64
ModelConfig.moe_pattern = (False, True)
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 4
Experiment.topology = @Topology()
Topology.num_pipelines = {pipelines}
Topology.num_stages = {stages}
Topology.num_expert_ranks = 2
Experiment.ranks = 'devices'
Experiment.compute_dtype = 'bfloat16'
Experiment.num_microbatches = 2
Experiment.sequences_per_microbatch = 2
"""


def needs(module: str):
    top = module.partition(".")[0]
    is_there = importlib.util.find_spec(top) is not None and importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not is_there, reason=f"{module} is not installed")


@pytest.fixture
def report(tmp_path, capfd):
    """The exit code and the only configuration's report."""

    def run(topology, *more, changes="", **sizes):
        (tmp_path / "small.gin").write_text(_SMALL.format(**sizes) + changes)
        code = main(["compile", str(tmp_path / "small.gin"), "--topology", topology, "--format", "json", *more])
        (found,) = json.loads(capfd.readouterr().out)["configurations"]
        return code, found

    return run


def assert_bytes(found) -> None:
    for name in ("exchange", "tokens"):
        assert found[name]["compiled_bytes"] == pytest.approx(found[name]["formula_bytes"], rel=0.01)
        assert found[name]["formula_bytes"] > 0


@needs("libtpu")
def test_a_slice_of_v5e_that_has_lost_a_worker(report):
    sizes = {"pipelines": 2, "stages": 4, "layers": 8, "dim": 128, "ffn": 256}
    code, found = report("v5e:4x4", "--fail", "1:2", **sizes)
    assert (code, found["result"], found["devices"], found["program"]) == (0, "fits", 14, "single")
    assert_bytes(found)
    assert found["predicted"]["step_ms"] > 0
    # Peers of stages of unequal size are summed by permutations.
    assert "collective-permute" in found["collectives"]


@needs("libtpu")
def test_what_does_not_fit_is_told_with_both_sizes(report):
    sizes = {"pipelines": 1, "stages": 2, "layers": 4, "dim": 8192, "ffn": 65536}
    code, found = report("v5e:2x2", **sizes)
    assert (code, found["result"]) == (3, "too large")
    assert found["memory"]["needed_bytes"] > found["memory"]["capacity_bytes"] == int(15.75 * 2**30)


@needs("libtpu")
@pytest.mark.parametrize(("pipelines", "stages"), [(2, 1), (1, 2)])
def test_slices_in_host_memory_are_not_in_that_of_devices(pipelines, stages, report):
    """Master weights and moments, 12 bytes a parameter: all of them are in one memory or in the other."""
    sizes = {"pipelines": pipelines, "stages": stages, "layers": 8, "dim": 256, "ffn": 1024}
    settings = "Experiment.optimizer = @OptimizerConfig()\nOptimizerConfig.memory = '{}'\n"
    (_, before), (code, found) = (
        report("v5p:2x2x1", changes=settings.format(memory), **sizes) for memory in ("device", "pinned_host")
    )
    assert (code, found["result"]) == (0, "fits")
    assert_bytes(found)
    device, host = before["memory"], found["memory"]
    moved = device["arguments_bytes"] - host["arguments_bytes"]
    assert device["host_arguments_bytes"] == 0
    assert host["host_arguments_bytes"] == pytest.approx(moved, rel=0.01)


_AT_ONCE = {
    "the best split": ("ExpertConfig.capacity = @RankCapacity()\nRankCapacity.spare_rounds = None\n", 1, 0),
    "exact": ("ExpertConfig.capacity = @ExactCapacity()\nExpertConfig.slots_per_rank = 3\n", 1, 3),
    "three experts on two ranks": (
        "ExpertConfig.capacity = @ExactCapacity()\nExpertConfig.slots_per_rank = 3\nExpertConfig.top_k = 3\n",
        2,
        3,
    ),
}
"""Settings, rows of a token, and how often the weights of a slot or their gradients travel in a micro-batch."""


@pytest.mark.parametrize(("changes", "rows", "fetched"), _AT_ONCE.values(), ids=_AT_ONCE)
@pytest.mark.parametrize(
    "topology",
    [pytest.param("v5e:2x2", marks=needs("libtpu")), pytest.param("h100:1x4", marks=needs("jax_plugins.xla_cuda13"))],
)
def test_rows_travel_all_at_once_and_no_others(topology, changes, rows, fetched, report):
    """Bytes that could travel are those of the tokens' rows, in F, B and W of both stages."""
    code, found = report(topology, pipelines=1, stages=2, layers=4, dim=256, ffn=256, changes=changes)
    assert (code, found["result"]) == (0, "fits")
    assert_bytes(found)
    # 2 layers, 2 micro-batches of 2 sequences, 2 bytes; there and back, forward and backward.
    of_rows = 4 * 2 * 2 * (2 * 64 * rows) * 256 * 2
    assert found["collectives"]["ragged-all-to-all"]["bytes"] == of_rows
    # 2 ranks of 3 slots, each of two matrices.
    assert found["tokens"]["compiled_bytes"] == of_rows + fetched * 2 * 2 * 2 * 3 * (2 * 256 * 256) * 2


@needs("jax_plugins.xla_cuda13")
def test_a_host_of_h100_that_has_lost_a_worker(report):
    sizes = {"pipelines": 2, "stages": 2, "layers": 4, "dim": 128, "ffn": 256}
    code, found = report("h100:1x8", "--fail", "1:1", **sizes)
    assert (code, found["result"], found["devices"]) == (0, "fits", 6)
    assert_bytes(found)
    assert "collective-permute" in found["collectives"]
    assert found["predicted"]["step_ms"] > 0
