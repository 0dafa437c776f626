"""``--expert-ranks`` of ``generate`` and ``evaluate``: the answers of one device, and no device has all experts."""

import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

import swift
from swift.cli.generate import prepare_engine
from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.errors import RunError, SettingError
from swift.evaluate.results import read_evaluations
from swift.experts.config import ExpertConfig
from swift.models.gpt import GPT
from tests.cli.test_evaluate import LINES, same

SWIFT = str(Path(swift.__file__).parent)
SLACK = 1024
"""Bytes for what else is on a device while a model is loaded, such as single numbers."""


@pytest.fixture
def both(half, tell):
    """A run and its model, and a task file beside them."""
    (half.parent / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert tell("export", "half", "--out", "model").code == 0
    return half


@contextmanager
def most_bytes():
    """Samples the bytes of new arrays on each device whenever a function of Swift is called, calls one or returns.

    Yields:
        The most that each device has had, by its number.
    """
    before = {id(array): array for array in jax.live_arrays()}  # kept, so that no number is given twice
    most = dict[int, int]()

    def is_swift(frame):
        return frame is not None and frame.f_code.co_filename.startswith(SWIFT)

    def sample(frame, event, _):
        if event not in ("call", "return") or not any(map(is_swift, (frame, frame.f_back))):
            return
        now = dict[int, int]()
        for array in jax.live_arrays():
            if id(array) not in before:
                held = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
                for device in array.sharding.device_set:
                    now[device.id] = now.get(device.id, 0) + held
        for device, held in now.items():
            most[device] = max(most.get(device, 0), held)

    sys.setprofile(sample)
    try:
        yield most
    finally:
        sys.setprofile(None)


def shares(model, num_ranks):
    """Bytes that each device is to have: all that is dense, and its share of the experts."""
    experiment = load_stored(Path(model), "MODEL", None)
    gpt = GPT(experiment.model, experiment.vocab_size, experiment.experts.num_classes)
    size = {name: sum(4 * leaf.size for leaf in jax.tree.leaves(of)) for name, of in gpt.weight_shapes.items()}
    return sum(size.values()) - size["expert"] * (num_ranks - 1) // num_ranks


COMMANDS = {
    "generate": ("generate", "model", "--prompt", "al", "--tokens", "2"),
    "evaluate a model": ("evaluate", "model", "--tasks", "mine.jsonl"),
    "evaluate a run": ("evaluate", "half", "--tasks", "mine.jsonl"),
}


@pytest.mark.long
@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_device_ever_has_more_than_its_share(tell, monkeypatch, command):
    """Weights go from the host to their own ranks alone; one rank has all, which the samples see."""

    def end(*_):
        raise RunError("the model is loaded")

    monkeypatch.setattr("swift.generate.engine.empty_pages", end)
    for num_ranks in (1, 2):
        with most_bytes() as most:
            told = tell(*COMMANDS[command], "--expert-ranks", str(num_ranks))
        assert (told.code, told.err.splitlines()[-1]) == (3, "swift: the model is loaded")
        share = shares("model", num_ranks)
        assert sorted(most) == list(range(num_ranks))
        assert all(share <= held <= share + SLACK for held in most.values()), (most, share)


@pytest.mark.usefixtures("both")
def test_texts_are_those_of_one_device(tell):
    line = ("generate", "model", "--prompt", "al", "--prompt", "beta gam", "--tokens", "24", "--format", "json")
    for choice in (("--temperature", "0"), ("--seed", "3")):
        one, two = (tell(*line, *choice, "--expert-ranks", ranks).out for ranks in "12")
        assert one == two
        assert one.count("\n") == 2


@pytest.mark.usefixtures("both")
def test_judgements_are_those_of_one_device(tell):
    """Asks a run and a model; questions that one device has answered are not asked again on two."""
    line = ("evaluate", "half", "model", "--tasks", "mine.jsonl", "--expert-ranks")
    for ranks in "12":
        assert tell(*line, ranks, "--out", f"{ranks}.json").code == 0
    for one, two in zip(*(read_evaluations(Path(f"{ranks}.json")) for ranks in "12"), strict=True):
        assert one.is_complete
        assert one.weights == two.weights
        assert all(map(same, two.judgements, one.judgements))
        assert len(two.judgements) == len(one.judgements)
    told = tell(*line, "2", "--out", "1.json", "--resume")
    assert told.err.count(": 9 questions, 9 of them answered before") == 2


MISTAKES = {
    "3": "--expert-ranks = 3: must divide 4, the number of experts",
    "8": "--expert-ranks = 8: must divide 4, the number of experts",
    "0": "--expert-ranks = 0: must be a whole number of at least 1",
    "-2": "--expert-ranks = -2: must be a whole number of at least 1",
    "two": "argument --expert-ranks: invalid int value: 'two' (--help lists what is possible)",
    "1.5": "argument --expert-ranks: invalid int value: '1.5' (--help lists what is possible)",
}


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("ranks", MISTAKES)
def test_ranks_that_cannot_be(refusal, ranks):
    for command in ("generate", "evaluate a run"):
        assert refusal(*COMMANDS[command], "--expert-ranks", ranks).endswith(MISTAKES[ranks])


def test_more_ranks_than_devices(monkeypatch):
    """The check is for a machine's own devices: as many are emulated as the option asks for."""
    monkeypatch.setattr("swift.cli.generate.prepare", lambda *_, **__: None)
    experiment = Experiment(experts=ExpertConfig(num_classes=16), ranks="devices")
    with pytest.raises(SettingError, match=r"^--expert-ranks = 16: must be at most 12, the number of devices$"):
        prepare_engine(16, [experiment])


def test_one_rank_starts_no_jax(monkeypatch):
    """Mistakes that are found later are told before a device is taken."""
    monkeypatch.setattr("swift.cli.generate.prepare", lambda *_, **__: None)
    monkeypatch.setattr("jax.devices", None)
    prepare_engine(1, [Experiment()])
    with pytest.raises(TypeError):
        prepare_engine(2, [Experiment()])


def test_the_experts_of_every_model_are_spread():
    models = [Experiment(experts=ExpertConfig(num_classes=count)) for count in (8, 12)]
    with pytest.raises(SettingError, match=r"^--expert-ranks = 8: must divide 12, the number of experts$"):
        prepare_engine(8, models)
