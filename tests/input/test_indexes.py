"""Indexes that input hosts help to build: the same tokens, whoever dies, and only with the same pipeline."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from swift.data.config import DataConfig
from swift.data.corpus import training_pipelines
from swift.data.index import find_index
from swift.data.loader import Loader
from swift.data.pipeline import Pipeline
from swift.data.records import JsonLines
from swift.data.remote_records import handle_request
from swift.data.sources import TextFiles
from swift.errors import SettingError
from swift.input.optimizer import plan_once
from tests.input.hosts import KEY, always_asked, connecting, content, lose, serving

NUM_TEXTS = 40


@dataclass(frozen=True)
class NotEmpty:
    def __call__(self, sample) -> bool:
        return sample["text"] != ""


@dataclass(frozen=True)
class Marked:
    def __call__(self, sample) -> dict:
        return {"text": f"marked {sample['text']}"}


@pytest.fixture(params=["pipeline", "texts"])
def config(request, tmp_path, monkeypatch) -> DataConfig:
    """Data of both kinds, whose records are begun elsewhere even where that takes longer."""
    always_asked(monkeypatch)
    texts = [f"text {number} " * (number % 5) for number in range(NUM_TEXTS)]
    if request.param == "texts":
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
        return DataConfig(TextFiles(f"{tmp_path}/*.txt"), validation_share=0.3)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = Pipeline(JsonLines(f"{tmp_path}/*.jsonl")).drop_duplicates().filter(NotEmpty(), reads=("text",))
    return DataConfig(made.map(Marked(), reads=("text",), writes=("text",)), validation_share=0.3)


def first_batches(config, index):
    shape = {"num_microbatches": 2, "sequences_per_microbatch": 3, "sequence_length": 5}
    loader = Loader(config, "train", **shape, seed=0, corpus=index)
    return [loader.batch(step).inputs for step in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["none", "one", "all", "silent"])
def test_the_index_is_that_of_this_machine_alone(config, lost, tmp_path, monkeypatch):
    plain = find_index(config, tmp_path / "plain", print)
    with serving(partial(training_pipelines, config), 2) as (address, _):

        def happens(num_answers: int) -> None:
            if num_answers == 20 and lost != "none":
                lose(lost)

        monkeypatch.setattr("swift.input.client._SILENCE_S", 0.5 if lost == "silent" else 60.0)
        connected, found = connecting(address, happens)
        said = []
        path = find_index(config, tmp_path / "helped", said.append, connect=connected, plan=plan_once)
        num_answers = found[0].num_answers
        assert said[0].startswith("offload: all up to ")
        assert any(" is lost: what" in line or " has not answered for " in line for line in said) == (lost != "none")
        assert num_answers > NUM_TEXTS if lost in ("none", "one") else 20 <= num_answers < NUM_TEXTS
        assert found[0].num_workers == {"none": 2, "one": 1}.get(lost, 0)
        # It is found again, without the hosts.
        assert find_index(config, tmp_path / "helped", print, connect=connected, plan=plan_once) == path
        assert len(found) == 1
    assert path.name == plain.name
    assert content(path) == content(plain)
    np.testing.assert_array_equal(first_batches(config, path), first_batches(config, plain))


@pytest.mark.slow
def test_a_host_with_another_key_or_operator_is_refused_and_nothing_stays(config, tmp_path):
    (one,) = training_pipelines(config)
    others = one.map(Marked(), reads=("text",), writes=("text",), name="more")
    with serving(partial(list, [others]), 1) as (address, _):
        for key, said in (("?" * 32, "is no input host, or has another key"), (KEY, "has another operators: all")):
            with pytest.raises(SettingError, match=f"--input-hosts = '127.0.0.1:.*': {said}"):
                find_index(config, tmp_path / "kept", print, connect=connecting(address, key=key)[0], plan=plan_once)
    assert [path for path in (tmp_path / "kept").iterdir() if path.suffix != ".lock"] == []


class Confused:
    """A host that answers with the record after the one that it is asked for."""

    num_workers = 2

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def ask(self, request: bytes) -> tuple[str, bytes]:
        fields = json.loads(request)
        if "number" in fields:
            fields["number"] = (fields["number"] + 1) % NUM_TEXTS
        return "there", handle_request(self.pipeline, json.dumps(fields).encode())

    def tell(self, host, line):
        raise AssertionError(f"{host} {line}")


def test_a_host_that_makes_something_else_is_named_and_nothing_stays(config, tmp_path):
    with pytest.raises(SettingError, match="input host there makes another sample of it than this machine"):
        find_index(
            config,
            tmp_path / "kept",
            print,
            connect=lambda pipeline, _: nullcontext(Confused(pipeline)),
            plan=plan_once,
        )
    assert [path for path in (tmp_path / "kept").iterdir() if path.suffix != ".lock"] == []
