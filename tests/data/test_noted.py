"""Pipelines that note which operator runs: the same samples, and for other processes the pipeline alone."""

import pickle
from dataclasses import replace

import pytest

from swift.data.pipeline import Pipeline, TracedPipeline, plain_plan
from swift.data.records import Rows
from swift.data.sample_store import survey_digest
from swift.data.samples import Samples
from swift.data.sources import DataError
from swift.input.profile import profile_input


def upper(sample) -> dict:
    return {"text": sample["text"].upper()}


def refuse_c(sample) -> dict:
    if sample["text"] == "C":
        raise ValueError("no c")
    return dict(sample)


def piped(texts: str) -> Pipeline:
    made = Pipeline(Rows([{"text": text} for text in texts])).drop_duplicates()
    return made.map(upper, reads=("text",), writes=("text",)).map(refuse_c)


def test_a_profile_notes_each_operator_while_it_runs():
    noted = []
    profile_input(TracedPipeline.of(piped("a"), noted.append), 1)
    one = ["drop_duplicates", "", "upper", "", "refuse_c", ""]
    assert noted[: 2 * len(one)] == one * 2  # once untimed; two threads follow, to see whether that is faster


def test_surveys_records_and_batches_note_each_operator_while_it_runs():
    noted = []
    made = TracedPipeline.of(piped("ab").batch(2).map(dict, name="as it is"), noted.append)
    samples = Samples(replace(plain_plan(made), check_every=0), 0)
    assert noted == ["drop_duplicates", ""] * 2
    noted.clear()
    samples[0]
    assert noted == ["upper", "", "refuse_c", ""] * 2 + ["as it is", ""]


def test_no_operator_runs_any_longer_once_it_has_raised():
    noted = []
    with pytest.raises(DataError, match="operator refuse_c: raises ValueError: no c"):
        Samples(plain_plan(TracedPipeline.of(piped("c"), noted.append)), 0)[0]
    assert noted[-2:] == ["refuse_c", ""]


def test_samples_and_digests_are_those_of_the_pipeline():
    plain = piped("abab")
    noted = TracedPipeline.of(plain, lambda _: None)
    ours, theirs = (Samples(plain_plan(one), 3) for one in (noted, plain))
    assert [ours[number] for number in range(5)] == [theirs[number] for number in range(5)]
    assert survey_digest(plain_plan(noted)) == survey_digest(plain_plan(plain))


def test_another_process_gets_the_pipeline_alone():
    noted = TracedPipeline.of(piped("ab"), lambda _: None)  # no pickle has a function without a name
    assert type(pickle.loads(pickle.dumps(noted))) is Pipeline
    assert noted.shuffle().operators[-1].name == "shuffle"
