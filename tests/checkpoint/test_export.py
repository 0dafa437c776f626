"""An exported model is the run's, to the bit; the text that it writes is what its logits say."""

import errno
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swift.checkpoint import arrays
from swift.checkpoint.manifest import Ledger
from swift.checkpoint.snapshots import begin_snapshot
from swift.checkpoint.writer import save_checkpoint
from swift.config.experiment import Experiment
from swift.data.tokenizer import ByteTokenizer
from swift.errors import RunError, SettingError
from swift.experts.config import ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.generate.continuation import generate
from swift.generate.programs import StreamedText
from swift.generate.request import Sampling
from swift.hub.exporting import export_model
from swift.models.config import ModelConfig
from swift.models.reference_model import plain_logits
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.model_directory import load_exported, widened
from swift.train.saved_state import split_of

LENGTH = 16
TINY = Experiment(
    model=ModelConfig(num_layers=2, model_dim=16, num_heads=2, ffn_dim=32, sequence_length=LENGTH),
    experts=ExpertConfig(num_classes=3, slots_per_rank=2),  # 6 slots: replicas that differ in number, padded slices
    topology=Topology(num_expert_ranks=4),
    optimizer=OptimizerConfig(warmup_steps=0),
    sequences_per_microbatch=4,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with a sound checkpoint, and the weights in it; a newer one is damaged."""
    directory, spec = tmp_path_factory.mktemp("run"), make_step_spec(TINY)
    state = spec.init(jax.random.key(3))
    split = split_of(spec)
    ledger = Ledger.first(split.num_layers, split.num_classes, 3)
    snapshot = begin_snapshot(split, state, spec.live, ledger.choose("sequential", full=True))()
    for step in (7, 8):
        options = {"identity": TINY.identity(), "extra": {}, "num_kept": 2}
        ledger = save_checkpoint(directory / "checkpoints", step, snapshot, split, ledger, **options).ledger
        snapshot.dense["step"] += 1
    (file,) = (directory / "checkpoints/step-00000008/arrays/state/step").glob("[0-9]*")
    file.write_bytes(b"?" + file.read_bytes()[1:])
    return directory, spec.gpt.unpack(spec.gather_master_weights(state))


@pytest.fixture(scope="module")
def model(run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    plan = export_model(TINY, run[0], path)
    assert (plan.step, len(plan.passed_over)) == (7, 1)
    assert plan.passed_over[0].startswith("step-00000008 is damaged: its file arrays/state/step/0 ")
    return path


def test_an_exported_model_has_the_weights_of_the_run(run, model):
    gpt, loaded = load_exported(TINY, model)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded), jax.tree.leaves(run[1]))
    assert jax.tree.structure(loaded) == jax.tree.structure(run[1])
    tokens_BT = jnp.arange(2 * LENGTH).reshape(2, LENGTH)
    forward = jax.jit(lambda weights: plain_logits(gpt, TINY.experts, weights, tokens_BT))
    logits = [forward(weights) for weights in (loaded, run[1])]
    np.testing.assert_array_equal(*logits)
    assert float(jnp.std(logits[0])) > 0


def test_one_of_another_shape_is_refused(model):
    wider = replace(TINY, model=replace(TINY.model, ffn_dim=64))
    with pytest.raises(
        SettingError, match=r"is a model of shape .*ffn_dim=32.*, and its configuration says .*ffn_dim=64"
    ):
        load_exported(wider, model)


def test_a_damaged_one_is_refused(model):
    for file in [file for file in (model / "state").rglob("*") if file.is_file() and file.stat().st_size]:
        before = file.read_bytes()
        file.write_bytes(before[:-1])
        with pytest.raises(SettingError, match=r"MODEL = .*is damaged: its file state/"):
            load_exported(TINY, model)
        file.write_bytes(before)


def test_a_directory_that_is_there_is_left_alone(run, tmp_path):
    (tmp_path / "mine").write_text("kept")
    for path in (tmp_path, tmp_path / "mine"):
        with pytest.raises(SettingError, match=r"--out = .* cannot be made a directory: File exists"):
            export_model(TINY, run[0], path)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_model_that_cannot_be_written_is_told_in_a_line_and_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrays, "write_signed", full)
    with pytest.raises(RunError, match=r"model: the model cannot be written: .*No space left on device$"):
        export_model(TINY, run[0], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_iteration_that_is_asked_for_is_that_one_or_none(run, tmp_path):
    with pytest.raises(SettingError, match="cannot be restored: step-00000008 is damaged"):
        export_model(TINY, run[0], tmp_path / "model", step=8)
    assert not (tmp_path / "model").exists()
    with pytest.raises(SettingError, match="--step = 9: must be one of 7, 8, which have a checkpoint"):
        export_model(TINY, run[0], tmp_path / "model", step=9)


def write(model: Path, prompt: str = "def ", num_tokens: int = 12, **options) -> str:
    sampling = Sampling(**{"temperature": 1.0, "top_k": 50, "seed": 0} | options)
    return "".join(piece for _, piece in generate(TINY, model, [prompt], num_tokens, sampling))


def test_the_same_seed_writes_the_same_text_and_another_seed_another(model):
    texts = [write(model, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("prompt", ["def ", "", "x" * (LENGTH + 5)], ids=["short", "empty", "longer than the context"])
def test_at_temperature_0_every_token_is_the_likeliest_one(model, prompt):
    gpt, weights = load_exported(TINY, model)
    logits = jax.jit(lambda seen_BT: plain_logits(gpt, TINY.experts, weights, seen_BT)[0, -1])
    tokenizer = TINY.data.tokenizer
    tokens = [*map(int, tokenizer.encode(prompt))] or [tokenizer.separator]
    start = len(tokens)
    for _ in range(3):
        tokens.append(int(jnp.argmax(logits(jnp.array([tokens[-LENGTH:]])))))
    text = tokenizer.decode(np.array(tokens[start:]))
    assert write(model, prompt, 3, temperature=0.0, seed=5).rstrip("\ufffd") == text.rstrip("\ufffd")


def test_the_choice_of_one_is_the_likeliest(model):
    assert write(model, top_k=1) == write(model, temperature=0.0)
    assert write(model, top_k=10**6) == write(model, top_k=256)


def test_a_character_of_several_tokens_is_shown_when_it_is_whole():
    for text, pieces in (("aß€!".encode(), ["a", "ß", "€", "!"]), (b"a\xffb\xe2\x82", ["a", "\ufffdb"])):
        assert list(filter(None, map(StreamedText(ByteTokenizer()).after, text))) == pieces


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("num_tokens", 0, "--tokens"),
        ("temperature", -0.1, "--temperature"),
        ("temperature", float("nan"), "--temperature"),
        ("top_k", 0, "--top-k"),
        ("seed", -1, "--seed"),
        ("seed", 2**32, "--seed"),
    ],
)
def test_a_value_that_cannot_be_is_refused(model, option, value, name):
    with pytest.raises(SettingError, match=f"{name} = .*: must be "):
        write(model, **{option: value})


@pytest.mark.parametrize(("compute", "master"), [("bfloat16", "float32"), ("float64", "float64")])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", "float64"])
def test_weights_get_the_type_of_master_weights(compute, master, stored):
    """Those of a narrower type are the same numbers; those of a wider one are rounded."""
    weights = {"head": {"w": np.array([1 / 3, -2.5], stored)}}
    (found,) = jax.tree.leaves(widened(replace(TINY, compute_dtype=compute), weights))
    assert isinstance(found, np.ndarray)
    assert found.dtype == master
    np.testing.assert_array_equal(found, weights["head"]["w"].astype(master))
