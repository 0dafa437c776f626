"""MFU: a model's FLOPs by the shapes of its matrices, and the peaks that they are compared with."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from swift.config.experiment import Experiment
from swift.data.config import DataConfig
from swift.data.sources import TextFiles
from swift.experts.config import ExpertConfig
from swift.mesh import devices
from swift.mesh.devices import host_matmul_flops, peak_flops
from swift.models.config import ModelConfig
from swift.models.gpt import GPT
from swift.models.reference_model import plain_logits
from swift.pipeline.reconfigure.engine import Engine
from swift.pipeline.split_backward.equations import dot_flops
from swift.topology import Topology
from swift.train import records
from swift.train.records import Utilization
from swift.train.trainer import train

CONFIG = ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=48, sequence_length=24, moe_pattern=(False,))


def test_a_models_flops_are_those_of_its_matmuls():
    gpt, tokens_BT = GPT(CONFIG, vocab_size=50, num_classes=4), jnp.zeros((3, 24), jnp.int32)
    weights = jax.eval_shape(lambda: gpt.unpack(gpt.init(jax.random.key(0))))
    forward = jax.make_jaxpr(lambda weights: plain_logits(gpt, ExpertConfig(), weights, tokens_BT))(weights)
    assert gpt.flops_per_token(top_k=1) == 3 * dot_flops(forward) / tokens_BT.size


def test_a_token_meets_only_the_experts_it_is_sent_to():
    gpt = GPT(replace(CONFIG, moe_pattern=(False, True)), vocab_size=50, num_classes=4)
    expert = 2 * CONFIG.model_dim * CONFIG.ffn_dim
    assert gpt.flops_per_token(2) - gpt.flops_per_token(1) == 6 * expert
    dense = GPT(CONFIG, vocab_size=50, num_classes=4)
    assert gpt.flops_per_token(1) - dense.flops_per_token(1) == 6 * CONFIG.model_dim * 4  # the router


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 494e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5 lite", "float64", None),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H200 NVL", "float32", 417e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA H100 SXM6 200GB", "bfloat16", None),
        ("NVIDIA H1000", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("TPU v5 mega", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_the_peak_of_a_chip(kind, dtype, peak):
    assert peak_flops(SimpleNamespace(device_kind=kind), dtype) == peak


def test_the_peak_of_this_host_is_that_of_its_matmuls():
    assert 1e8 < host_matmul_flops("float32") < 1e14


def test_other_programs_do_not_lower_the_peak_of_this_host(monkeypatch):
    """Half of the time by the clock goes to others; the peak is that of the time on all cores."""
    clock = iter(range(0, 100, 10))
    used = iter(range(0, 100, 10))
    times = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(used))
    monkeypatch.setattr(devices, "time", times)
    monkeypatch.setattr(devices, "cores_allowed", lambda: 4)
    monkeypatch.setattr(devices, "cores_limit", lambda: limit)
    limit = None
    assert host_matmul_flops("float32") == 2 * 1024**3 / 2.5
    clock, used, limit = iter(range(0, 100, 10)), iter(range(0, 100, 10)), 2.0
    assert host_matmul_flops("float32") == 2 * 1024**3 / 5


def test_the_peak_of_this_host_is_measured_before_programs_are_compiled_in_the_background(tmp_path, monkeypatch):
    class Measured(Exception):
        pass

    def measure(dtype):
        assert dtype == jnp.float32
        raise Measured(list(begun))

    begun = []
    monkeypatch.setattr(Engine, "_prepare_next", begun.append)
    monkeypatch.setattr(records, "host_matmul_flops", measure)
    (tmp_path / "text.txt").write_text("experts " * 400)
    experiment = Experiment(
        model=CONFIG,
        topology=Topology(num_pipelines=2, num_expert_ranks=1),
        experts=ExpertConfig(num_classes=4),
        data=DataConfig(TextFiles(str(tmp_path / "*.txt"))),
        num_steps=30,
        sequences_per_microbatch=1,
        failures=("step 20: fail 1:0",),
    )
    with pytest.raises(Measured) as measured:
        train(experiment, tmp_path / "run")
    assert measured.value.args == ([],)


def test_mfu_is_a_share_of_all_devices_peaks():
    record = {"tokens_per_s": 1000.0, "live_workers": 2, "live_ranks": 4}
    assert Utilization(100, 1e6, is_shared=True).mfu(record) == {"mfu": 0.1}
    assert Utilization(100, 1e6, is_shared=False).mfu(record) == {"mfu": 0.0125}
    assert Utilization(100, None, is_shared=True).mfu(record) == {}
