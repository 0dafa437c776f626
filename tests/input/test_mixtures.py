"""Mixtures whose sources input hosts help to read: the batches of the mixture that is read here, whoever is lost."""

import json
import random
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.data.config import DataConfig, Mixture
from swift.data.corpus import training_pipelines
from swift.data.index import find_index
from swift.data.loader import Loader
from swift.data.pipeline import Pipeline
from swift.data.records import JsonLines
from swift.data.remote_records import handle_request
from swift.data.sources import TextFiles, TokenFile
from swift.errors import SettingError
from swift.input.optimizer import plan_once
from tests.data.operators import LongerThan
from tests.input.hosts import KEY, always_asked, connecting, content, lose, serving

NUM_DOCUMENTS = 40


@dataclass(frozen=True)
class Marked:
    mark: str

    def __call__(self, sample) -> dict:
        return {"text": f"{self.mark} {sample['text']}"}


def documents(directory: Path, name: str) -> list[str]:
    directory.mkdir()
    return [f"{name} {number} " * (number % 5) for number in range(NUM_DOCUMENTS)]


def texts(directory: Path) -> TextFiles:
    for number, text in enumerate(documents(directory, "text")):
        (directory / f"{number}.txt").write_text(text)
    return TextFiles(f"{directory}/*.txt")


def piped(directory: Path, least: int = 9, marks: tuple[str, ...] = ("marked",), is_unique: bool = True) -> Pipeline:
    lines = [json.dumps({"text": text}) + "\n" for text in documents(directory, "line")]
    (directory / "texts.jsonl").write_text("".join(lines))
    made = Pipeline(JsonLines(f"{directory}/*.jsonl"))
    made = made.drop_duplicates() if is_unique else made
    for number, mark in enumerate(marks):
        made = made.map(Marked(mark), reads=("text",), writes=("text",), name=f"mark {number}")
    return made.filter(LongerThan(least), reads=("text",))


def tokens(directory: Path) -> TokenFile:
    directory.mkdir()
    np.arange(5000, dtype="<u2").reshape(-1, 50)[:, :49].ravel().clip(0, 255).tofile(directory / "tokens.bin")
    return TokenFile(f"{directory}/tokens.bin", vocab_size=256)


def loader(config: DataConfig, corpus: Path | None = None) -> Loader:
    """Batches of a mixture; without an index each source is read here, and nothing of it is optimised."""
    shape = {"num_microbatches": 2, "sequences_per_microbatch": 3, "sequence_length": 8}
    return Loader(config, "train", **shape, seed=3, corpus=corpus)


def assert_same(config: DataConfig, plain: Path, helped: Path) -> None:
    """Checks that indexes and batches are equal, and that a run resumes with either, and reads single micro-batches."""
    built = [{path.name: content(path) for path in one.iterdir() if path.is_dir()} for one in (plain, helped)]
    assert built[0] == built[1]
    unoptimised, with_hosts = loader(config), loader(config, helped)
    for _ in range(3):
        np.testing.assert_array_equal(next(unoptimised)[:3], next(with_hosts)[:3])
    resumed, other = loader(config, helped), loader(config)
    assert resumed.restore(unoptimised.state()) == other.restore(with_hosts.state()) == []
    whole = next(unoptimised)
    np.testing.assert_array_equal(next(resumed)[:3], whole[:3])
    np.testing.assert_array_equal(next(other)[:3], whole[:3])
    for number in range(2):  # as each of two hosts reads it
        np.testing.assert_array_equal(resumed.microbatch(3, number).inputs, whole.inputs[number])


@pytest.fixture
def config(tmp_path, monkeypatch) -> DataConfig:
    always_asked(monkeypatch)
    sources = (piped(tmp_path / "lines"), tokens(tmp_path / "tokens"), texts(tmp_path / "texts"))
    return DataConfig(Mixture(sources, (3.0, 1.0, 2.0)), validation_share=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["none", "one", "all", "silent"])
def test_the_batches_are_those_of_this_machine_alone(config, lost, tmp_path, monkeypatch):
    plain = find_index(config, tmp_path / "plain", print)
    with serving(partial(training_pipelines, config), 2) as (address, _):

        def happens(num_answers: int) -> None:
            if num_answers == 20 and lost != "none" and len(found) == 1:
                lose(lost)

        monkeypatch.setattr("swift.input.client._SILENCE_S", 0.5 if lost == "silent" else 60.0)
        connected, found = connecting(address, happens)
        said = []
        helped = find_index(config, tmp_path / "helped", said.append, connect=connected, plan=plan_once)
        assert next(line for line in said if line.startswith("offload: ")).startswith("offload: all up to ")
        assert any(" is lost: what" in line or " has not answered for " in line for line in said) == (lost != "none")
        first, second = found  # the token file has no records
        assert first.num_answers > NUM_DOCUMENTS if lost in ("none", "one") else 20 <= first.num_answers < NUM_DOCUMENTS
        if lost == "none":  # whose processes are free again for the next source
            assert first.num_workers == second.num_workers == 2
            assert second.num_answers > NUM_DOCUMENTS
        assert find_index(config, tmp_path / "helped", print, connect=connected, plan=plan_once) == helped
        assert len(found) == 2
    assert_same(config, plain, helped)


@pytest.mark.slow
def test_a_source_that_the_host_does_not_have_is_refused_and_one_that_it_has_is_served_alone(config, tmp_path):
    first, _, last = config.source.sources
    with serving(partial(training_pipelines, config), 1) as (address, _):
        connected, found = connecting(address)
        find_index(replace(config, source=last), tmp_path / "alone", print, connect=connected, plan=plan_once)
        assert found[0].num_answers > NUM_DOCUMENTS
        for source, said in ((first.map(Marked("!")), "operators"), (texts(tmp_path / "others"), "data")):
            other = replace(config, source=Mixture((source, last), (1.0, 1.0)))
            with pytest.raises(SettingError, match=f"--input-hosts = '127.0.0.1:.*': has another {said}: all"):
                find_index(other, tmp_path / said, print, connect=connecting(address, key=KEY)[0], plan=plan_once)


class Unsteady:
    """Hosts in this process that answer some requests, and are lost at some time."""

    def __init__(self, pipeline: Pipeline, seed: int, is_lost_after: int):
        self.pipeline, self.random, self.left = pipeline, random.Random(seed), is_lost_after

    @property
    def num_workers(self) -> int:
        return 2 if self.left > 0 else 0

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        self.left -= 1
        if self.left < 0 or (b'"number"' in request and self.random.random() < 0.3):
            return None
        return "there", handle_request(self.pipeline, request)

    def tell(self, host: str, line: str) -> None:
        raise AssertionError(f"{host} {line}")


PIPELINES = st.builds(
    lambda least, marks, is_unique: partial(piped, least=least, marks=tuple(marks), is_unique=is_unique),
    st.integers(0, 20),
    st.lists(st.sampled_from("abc"), max_size=2),
    st.booleans(),
)
SOURCES = st.lists(st.one_of(PIPELINES, st.just(texts), st.just(tokens)), min_size=1, max_size=3)


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(make=SOURCES, seed=st.integers(0, 99), is_lost_after=st.integers(4, 150), data=st.data())
def test_any_mixture_is_the_one_that_is_read_here(make, seed, is_lost_after, data):
    weights = tuple(data.draw(st.floats(0.5, 4.0)) for _ in make)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        always_asked(monkeypatch)
        here = Path(directory)
        sources = tuple(one(here / str(place)) for place, one in enumerate(make))
        config = DataConfig(Mixture(sources, weights), validation_share=0.3)
        asked = []

        def connect(pipeline, _):
            asked.append(Unsteady(pipeline, seed, is_lost_after))
            return nullcontext(asked[-1])

        plain = find_index(config, here / "plain", print)
        helped = find_index(config, here / "helped", print, connect=connect, plan=plan_once)
        assert len(asked) == sum(one is not tokens for one in make)
        assert all(one.left < is_lost_after for one in asked)
        assert_same(config, plain, helped)
