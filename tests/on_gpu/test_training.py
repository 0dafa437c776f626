"""Training on a GPU: the losses of a CPU, the same bits again, and what only accelerators have."""

import numpy as np
import pytest

from swift.runlog.reading import read_run
from tests.elastic.runs import losses
from tests.on_gpu.runs import config_of, told, trained

pytestmark = pytest.mark.slow
CASES = {
    "one rank, capacity by slot": {},
    "one rank, capacity by rank": {"ExpertConfig__capacity": "@RankCapacity()"},
    "one rank, exact capacity, two of four experts": {
        "ExpertConfig__capacity": "@ExactCapacity()",
        "ExpertConfig__top_k": 2,
    },
    "four virtual ranks": {"ranks": 4},
    "four virtual ranks, capacity by rank": {
        "ranks": 4,
        "ExpertConfig__capacity": "@RankCapacity()",
        "ExpertConfig__top_k": 2,
    },
    "four virtual ranks, exact capacity": {"ranks": 4, "ExpertConfig__capacity": "@ExactCapacity()"},
    "host memory": {"OptimizerConfig__memory": "pinned_host"},
    "a sharded embedding and head": {"ranks": 4, "Experiment__embedding": "sharded", "Experiment__head": "sharded"},
    "documents apart, blocks recomputed": {"Experiment__separate_documents": True, "Experiment__remat": "block"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_losses_are_those_of_a_cpu(tmp_path, settings):
    on_cpu = {"OptimizerConfig__memory": "device"} if "OptimizerConfig__memory" in settings else {}
    expected = trained(tmp_path, "cpu", config_of(tmp_path, 12, **(settings | on_cpu)))
    np.testing.assert_allclose(trained(tmp_path, "cuda", config_of(tmp_path, 12, **settings)), expected, rtol=1e-9)


NARROW = {"Experiment__compute_dtype": "bfloat16", "ModelConfig__sequence_length": 128}


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_resumed_run_has_the_same_bits(tmp_path, ranks):
    """In bfloat16, by the kernels that a run takes there: no sum is in an order of chance."""
    experts = {"ExpertConfig__capacity": "@RankCapacity()", "ExpertConfig__top_k": 2}
    config = config_of(tmp_path, 20, ranks=ranks, **NARROW, **experts, Experiment__separate_documents=True)
    at_once = trained(tmp_path / "at once", "cuda", config)
    trained(tmp_path / "in two parts", "cuda", config, "--stop-at", 9)
    in_parts = trained(tmp_path / "in two parts", "cuda", config, "--resume")
    np.testing.assert_array_equal(in_parts, at_once)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("capacity", ["@RankCapacity()", "@ExactCapacity()"])
def test_kernels_of_experts_train_alike(tmp_path, capacity, ranks):
    """float64, in which losses agree to the ninth digit, does not take these kernels."""
    settings = {"ranks": ranks, "ExpertConfig__capacity": capacity, "ExpertConfig__top_k": 2}
    wide = {"Experiment__compute_dtype": "float32", "ModelConfig__sequence_length": 128}
    expected = trained(tmp_path, "cpu", config_of(tmp_path, 12, **settings, **wide))
    found = trained(tmp_path, "cuda", config_of(tmp_path, 12, **settings, **NARROW))
    np.testing.assert_allclose(found, expected, rtol=5e-3)


@pytest.mark.parametrize("kernel", ["triton", "cudnn", "blockwise", "tiled", "plain"])
def test_kernels_of_attention_train_alike(tmp_path, kernel):
    """bfloat16 keeps 8 bits; of a loss, the mean of many tokens, more remain."""
    settings = NARROW | {"Experiment__separate_documents": kernel != "cudnn"}
    expected = trained(tmp_path, "cpu", config_of(tmp_path, 12, **settings | {"Experiment__compute_dtype": "float32"}))
    found = trained(tmp_path, "cuda", config_of(tmp_path, 12, **settings, Experiment__attention=kernel))
    np.testing.assert_allclose(found, expected, rtol=5e-3)


def test_a_killed_process_starts_again(tmp_path):
    """One process with one GPU, as ``launch`` starts them: after its death from the newest checkpoint."""
    config = config_of(tmp_path, 24, CheckpointConfig__every=5)
    chaos = ["--chaos", "step 14: kill 0:0"]
    told("cuda", "launch", config, "--platform", "gpu", "--processes", 1, "--run-dir", tmp_path / "run", *chaos)
    expected = trained(tmp_path, "cpu", config, "--set", "CheckpointConfig.every=0")
    np.testing.assert_allclose(losses(tmp_path / "run"), expected, rtol=1e-9)
    assert "process_died" in {event["event"] for event in read_run(tmp_path / "run").events}


def test_launch_takes_the_kernels_of_its_devices(tmp_path):
    """The same bits as ``train``, which other kernels would not give."""
    config = config_of(tmp_path, 12, **NARROW, Experiment__separate_documents=True)
    told("cuda", "launch", config, "--platform", "gpu", "--processes", 1, "--run-dir", tmp_path / "run")
    np.testing.assert_array_equal(losses(tmp_path / "run"), trained(tmp_path, "cuda", config))


def test_a_model_trained_there_speaks_here(tmp_path):
    """Greedily, the same words on both; the machine is described."""
    config = config_of(tmp_path, 12, CheckpointConfig__every=12)
    trained(tmp_path, "cuda", config)
    told("cpu", "export", tmp_path / "cuda", "--out", tmp_path / "model")
    options = ["--prompt", "abc", "--temperature", "0", "--tokens", "30", "--format", "json"]
    texts = {platform: told(platform, "generate", tmp_path / "model", *options) for platform in ("cpu", "cuda")}
    assert texts["cpu"] == texts["cuda"]
    assert "NVIDIA" in told("cuda", "doctor")
