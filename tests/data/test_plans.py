"""Every plan of a pipeline gives the samples that a list of lists would give, bit for bit, from any place on."""

import itertools
from dataclasses import replace

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.data.operators import DropDuplicates, Filter, Map, Pack, Shuffle, Stack, name_of
from swift.data.pipeline import InputPlan, Pipeline, plain_plan
from swift.data.records import Rows
from swift.data.remote_records import handle_request
from swift.data.sample_store import find_survey
from swift.data.samples import Samples
from swift.data.survey import in_order
from swift.data.tokenizer import ByteTokenizer
from swift.input.optimizer import Resources, legal_orders, plan_input
from swift.input.profile import InputProfile, OperatorProfile

WORDS = ["", "ox", "", "ant", "bee", "ant", "owl and ox", "x", "bee", "yak", "x", "a gnu"]
RECORDS = [{"b": word, "c": place % 5, "a": np.arange(3) + place} for place, word in enumerate(WORDS)]


def add(amount: int):
    return lambda sample: {"a": sample["a"] + amount}


ELEMENTS = (
    Map(add(1), ("a",), ("a",), name="add one"),
    Map(add(5), ("a",), ("a",), depends_on=(), name="add five"),  # true of sums; double is fixed
    Map(lambda sample: {"a": sample["a"] * 2}, ("a",), ("a",), is_fixed=True, name="double"),
    Map(lambda sample: {"c": len(sample["b"])}, ("b",), ("c",), name="measure"),
    Map(lambda sample: {**sample, "d": str(sample["c"])}, name="anything"),
    Map(lambda sample: {"b": sample["b"] + "s"}, ("b",), ("b",), is_fixed=True, name="plural"),
    Map(lambda sample, rng: {"a": sample["a"] + rng.integers(9)}, ("a",), ("a",), is_random=True, name="noise"),
    Map(lambda _, rng: {"e": rng.random()}, (), ("e",), is_random=True, name="weight"),
    Filter(lambda sample: len(sample["b"]) > 0, ("b",), name="some text"),
    Filter(lambda sample: sample["b"][0] != "o", ("b",), depends_on=(), name="no o"),  # raises on an empty text
    Filter(lambda sample: sample["c"] % 3 != 1, ("c",), name="thirds"),
    Filter(lambda sample: len(sample) > 1, name="all fields"),
    DropDuplicates("b"),
)


def epoch_of(pipeline: Pipeline, seed: int, epoch: int) -> list[tuple[int, dict]]:
    """The numbered samples of one epoch before batches, by lists alone."""
    samples = [(number, dict(pipeline.source[number])) for number in range(len(pipeline.source))]
    level = 0
    for place, operator in enumerate(pipeline.operators):
        if isinstance(operator, Filter):
            samples = [(n, s) for n, s in samples if operator.function(s)]
        elif isinstance(operator, DropDuplicates):
            seen = set()
            samples = [(n, s) for n, s in samples if not (s[operator.field] in seen or seen.add(s[operator.field]))]
        elif isinstance(operator, Shuffle):
            spread = int(np.random.SeedSequence((seed, level)).generate_state(1)[0])
            order = grain.MapDataset.range(len(samples)).shuffle(seed=spread)
            samples = [samples[order[epoch * len(samples) + place]] for place in range(len(samples))]
        elif isinstance(operator, Pack):
            level += 1
            tokens, length = [t for _, s in samples for t in s["tokens"]], operator.length
            owners = [i for i, (_, s) in enumerate(samples) for _ in s["tokens"]]
            rows = []
            for start in range(0, len(tokens) - 1, length):
                row, owned = tokens[start : start + length + 1], owners[start : start + length + 1]
                segments = [1 + sum(a != b for a, b in itertools.pairwise(owned[: i + 1])) for i in range(len(row))]
                padding = [0] * (length + 1 - len(row))
                pair = np.array([row + padding, segments + padding], np.int32)
                rows.append((start // length, {"tokens": pair[0], "segments": pair[1]}))
            samples = rows
        elif isinstance(operator, Stack):
            break
        else:
            made = []
            for number, sample in samples:
                draw = (
                    [np.random.default_rng((seed, place, epoch, number))] if getattr(operator, "is_random", 0) else []
                )
                made.append((number, {**sample, **operator.function(sample, *draw)}))
            samples = made
    return samples


def expected(pipeline: Pipeline, seed: int, num: int) -> list[dict]:
    """The first samples of a pipeline."""
    sizes = [operator.size for operator in pipeline.operators if isinstance(operator, Stack)]
    per_sample = int(np.prod(sizes, dtype=int))
    singles = list[dict]()
    for epoch in itertools.count():
        samples = epoch_of(pipeline, seed, epoch)
        assert samples
        singles += [sample for _, sample in samples]
        if len(singles) >= num * per_sample:
            break
    for size in sizes:
        whole = [singles[i : i + size] for i in range(0, len(singles) - size + 1, size)]
        singles = [{name: np.stack([s[name] for s in group]) for name in group[0]} for group in whole]
    return singles[:num]


def check_equal(sample: dict, other: dict) -> None:
    assert set(sample) == set(other)
    for name, value in sample.items():
        np.testing.assert_array_equal(value, other[name], strict=True)
        assert type(value) is type(other[name])


@st.composite
def pipelines(draw) -> Pipeline:
    """A pipeline of any operators in any order that is allowed."""
    chosen = draw(st.lists(st.sampled_from(ELEMENTS), max_size=6, unique_by=id))
    first = [one for one in chosen if not isinstance(one, Map) or not one.is_random]
    kept = [one for one in first if isinstance(one, Filter | DropDuplicates)]
    if any(one.name == "no o" for one in kept) and not any(one.name == "some text" for one in kept):
        first = [ELEMENTS[8], *first]
    first.sort(key=lambda one: one.name == "no o")  # where it is written, no text is empty
    pipeline = Pipeline(Rows(RECORDS))
    for one in first:
        pipeline = pipeline.then(one)
    if draw(st.booleans()):
        pipeline = pipeline.shuffle()
    if draw(st.booleans()):
        pipeline = pipeline.tokenize(ByteTokenizer(), "b").pack(draw(st.integers(1, 9)))
        if draw(st.booleans()):
            pipeline = pipeline.shuffle()
        pipeline = pipeline.map(lambda _, rng: {"r": rng.random()}, reads=(), writes=("r",), is_random=True)
    else:
        for one in chosen:
            pipeline = pipeline.then(one) if one not in first else pipeline
        for one in draw(st.lists(st.sampled_from(ELEMENTS[:5]), max_size=2, unique_by=id)):
            pipeline = pipeline.then(replace(one, name=one.name + " again"))
    if draw(st.booleans()):
        pipeline = pipeline.batch(draw(st.integers(1, 4)))
    return pipeline


@st.composite
def profiles(draw, pipeline: Pipeline) -> InputProfile:
    """Any times and sizes, so that any order may seem best."""
    seconds, share = st.floats(1e-6, 1.0), st.floats(0.1, 1.0)
    operators = tuple(
        OperatorProfile(name_of(one), draw(seconds), 1e-6, 100.0, draw(st.floats(10, 1000)), draw(share), draw(share))
        for one in pipeline.levels[0].elements
    )
    source = OperatorProfile("source", draw(seconds), 1e-6, 0.0, 100.0)
    return InputProfile(12, len(RECORDS), source, operators, 4.0, (1e-9, 1e-9), {}, draw(st.sampled_from([1.0, 2.0])))


class Now:
    """A host in the same process, one of whose processes is lost at every fourth request."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.num_asked = pipeline, 0

    @property
    def num_workers(self) -> int:
        return max(0, 4 - self.num_asked // 4)

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        if not self.num_workers:
            return None
        self.num_asked += 1
        return ("now", handle_request(self.pipeline, request)) if self.num_asked % 4 else None

    def tell(self, host: str, line: str) -> None:
        assert (host, line[:11]) == ("now", "cannot make")


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), first=st.integers(0, 12))
def test_any_plan_gives_the_samples_of_the_pipeline_from_any_place_on(data, seed, first, tmp_path_factory):
    pipeline = data.draw(pipelines())
    directory = data.draw(st.sampled_from([None, tmp_path_factory.mktemp("kept")]))
    used = Resources(
        data.draw(st.sampled_from([1.0, 100.0])), 1, data.draw(st.sampled_from([0, 1 << 20])), 1 << 20, directory
    )
    plan = replace(plan_input(pipeline, used, data.draw(profiles(pipeline))), check_every=3)
    last = len(plan.orders[0]) if plan.cache is None else plan.cache.num_elements
    offloaded = replace(plan, num_offloaded=data.draw(st.integers(0, last)), num_processes=0)
    said = expected(pipeline, seed, first + 6)
    for one in (plain_plan(pipeline), plan, offloaded):
        hosts = Now(pipeline)
        samples = Samples(one, seed, find_survey(one, directory, lambda _: None, hosts=hosts), hosts)
        for number in (*range(first, first + 6), 0):
            check_equal(samples[number], said[number])


@settings(max_examples=40)
@given(data=st.data())
def test_any_legal_order_gives_the_samples_of_the_pipeline(data):
    pipeline = data.draw(pipelines())
    orders = list(legal_orders(pipeline.levels[0].elements, 200))
    order = tuple(map(name_of, data.draw(st.sampled_from(orders))))
    plan = replace(plain_plan(pipeline), orders=(order, *plain_plan(pipeline).orders[1:]))
    samples, said = Samples(plan, 7), expected(pipeline, 7, 5)
    for number in range(5):
        check_equal(samples[number], said[number])


def text_pipeline() -> Pipeline:
    texts = Pipeline(Rows([{"text": word * 3} for word in WORDS]))
    return texts.filter(lambda sample: len(sample["text"]) > 3, name="long").tokenize(ByteTokenizer()).pack(7).shuffle()


@pytest.mark.parametrize("workers", [{"num_threads": 3, "num_ahead": 4}, {"num_threads": 0}])
def test_samples_that_are_made_ahead_come_in_order_from_any_place_on(workers):
    pipeline = text_pipeline().batch(2)
    plan: InputPlan = replace(plain_plan(pipeline), **workers)
    said = expected(pipeline, 3, 9)
    for first in (0, 4):
        for sample, other in zip(
            itertools.islice(in_order(Samples(plan, 3), plan, first), 5), said[first:], strict=False
        ):
            check_equal(sample, other)


def test_another_seed_or_epoch_has_another_order():
    pipeline = Pipeline(Rows(RECORDS)).map(lambda sample: {"c": sample["c"]}).shuffle()
    orders = [[int(Samples(plain_plan(pipeline), seed)[i]["c"]) for i in range(24)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert orders[0][:12] != orders[0][12:]
    assert sorted(orders[0][:12]) == sorted(orders[0][12:]) == sorted(record["c"] for record in RECORDS)
