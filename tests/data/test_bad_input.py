"""Operators that raise or are untrue, processes that die, places that cannot be written: one line each, by name."""

import errno
import itertools
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from swift.data import sample_store as store_module
from swift.data.pipeline import CachePoint, InputPlan, Pipeline, plain_plan
from swift.data.records import Rows
from swift.data.sample_checks import MisdeclaredOperator
from swift.data.sample_store import check_writable, find_survey
from swift.data.samples import Samples
from swift.data.sources import DataError
from swift.data.survey import in_order
from swift.data.tokenizer import ByteTokenizer
from swift.errors import SettingError
from swift.input.optimizer import Resources, plan_input
from swift.input.profile import profile_input

NUMBERS = Rows([{"a": number, "b": "x" * number} for number in range(8)])


def halved(sample):
    if sample["a"] == 5:
        raise ValueError("five is odd\nand more")
    return {"a": sample["a"] // 2}


def planned(pipeline: Pipeline, *order: str, **changes) -> InputPlan:
    """The plan of an order, every sample compared."""
    plain = plain_plan(pipeline)
    return replace(plain, orders=(order or plain.orders[0], *plain.orders[1:]), check_every=1, **changes)


def read(plan: InputPlan, num: int = 8) -> list:
    samples = Samples(plan, 0)
    return [samples[number] for number in range(num)]


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline(NUMBERS).map(halved), "record 5: operator halved: raises ValueError: five is odd$"),
        (Pipeline(NUMBERS).filter(halved).filter(lambda s: s["c"], name="c"), "operator c: raises KeyError: 'c'"),
        (
            Pipeline(NUMBERS).map(halved, reads=("c",), writes=("a",)),
            "record 0: operator halved: there is no field 'c', there are a, b",
        ),
        (
            Pipeline(NUMBERS).map(halved, reads=("a",), writes=("b",)),
            "record 0: operator halved: returns the fields a, and its `writes` names b",
        ),
        (Pipeline(NUMBERS).map(len), "record 0: operator len: returns int, and must return a mapping of fields"),
        (Pipeline(NUMBERS).pack(3), "record 0: operator pack: there is no field 'tokens', there are a, b"),
        (Pipeline(NUMBERS).drop_duplicates("c"), "record 0: operator drop_duplicates: there is no field 'c'"),
        (Pipeline(Rows([{"c": [len]}])).drop_duplicates("c"), "field 'c' cannot be compared: field 'field' is a list"),
        (
            Pipeline(Rows([{"a": np.ones(2)}, {"a": np.ones(3)}])).batch(2),
            r"operator batch: samples of a batch differ: {'a': \(2,\)} and {'a': \(3,\)}",
        ),
    ],
)
def test_an_operator_that_raises_is_named_with_its_record(pipeline, said):
    with pytest.raises(DataError, match=said) as error:
        read(plain_plan(pipeline))
    assert "\n" not in str(error.value)


def test_records_are_skipped_up_to_a_limit():
    pipeline = Pipeline(NUMBERS, most_skipped=1).map(halved, reads=("a",), writes=("a",))
    samples = Samples(plain_plan(pipeline), 0)
    assert samples.num_per_epoch == 7
    assert [samples[number]["a"] for number in range(8)] == [0, 0, 1, 1, 2, 3, 3, 0]
    assert samples.found.skipped == ("record 5: operator halved: raises ValueError: five is odd",)
    twice = replace(pipeline, source=Rows([{"a": 5}, {"a": 1}, {"a": 5}]))
    with pytest.raises(DataError, match=r"record 2: .* Pipeline.most_skipped = 1 records were skipped before"):
        Samples(plain_plan(twice), 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Pipeline(NUMBERS).filter(lambda s: s["a"] > 9), "no record stays"),
        (Pipeline(Rows([{"text": ""}])).tokenize(ByteTokenizer()).pack(4), "holds 0 tokens: too few for a row"),
    ],
)
def test_nothing_to_read_is_refused(source, said):
    with pytest.raises(SettingError, match=f"Pipeline.source = .*{said}"):
        Samples(plain_plan(source), 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p.shuffle().filter(len), "'len': must stand before shuffle: what stays is decided once"),
        (lambda p: p.batch(2).filter(len), "'len': must stand before batch"),
        (lambda p: p.batch(2).shuffle(), "'shuffle': must stand before the batch"),
        (lambda p: p.shuffle().shuffle(), "'shuffle-2': must stand before the batch, and once"),
        (lambda p: p.map(len, is_random=True).pack(3), "'pack': must stand before every batch and random operator"),
        (lambda p: p.map(len, depends_on=("decode",)), "len.depends_on = 'decode': is not an operator before it"),
        (lambda p: p.map(3), "Map.function = 3: must be a function of a sample"),
        (lambda p: p.map(len, reads="text"), "Map.reads = 'text': must be a tuple of names"),
        (lambda p: p.batch(0), "Stack.size = 0: must be a whole number of at least 1"),
        (lambda p: replace(p, operators=(len,)), "Pipeline.operators = .*: is not an operator"),
    ],
)
def test_an_order_that_has_no_meaning_is_refused(make, said):
    with pytest.raises(SettingError, match=said):
        make(Pipeline(NUMBERS))


def double(sample):
    return {"a": sample["a"] * 2}


def more(sample):
    return {"a": sample["a"] + 1}


def test_an_operator_that_leaves_out_what_it_depends_on_is_named():
    lies = (
        Pipeline(NUMBERS).map(double, reads=("a",), writes=("a",)).map(more, reads=("a",), writes=("a",), depends_on=())
    )
    assert [sample["a"] for sample in read(planned(lies), 3)] == [1, 3, 5]
    with pytest.raises(MisdeclaredOperator, match="record 0: operator more depends on double, which its `depends_on`"):
        read(planned(lies, "more", "double"))


def test_an_operator_that_writes_into_what_it_is_given_is_named():
    def into(sample):
        sample["a"] += 1
        return {"c": int(sample["a"][0])}

    def first(sample):
        return {"d": int(sample["a"][0])}

    pipeline = Pipeline(_Fresh()).map(first, reads=("a",), writes=("d",)).map(into, reads=("a",), writes=("c",))
    assert read(planned(pipeline), 1)[0]["d"] == 1
    with pytest.raises(MisdeclaredOperator, match="operators into and first change more than their fields"):
        read(planned(pipeline, "into", "first"))


class _Fresh:
    """A source whose arrays are new at every read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number):
        return {"a": np.ones(2)}

    def place(self, number):
        return f"record {number}"

    name = place

    def digest(self):
        return "fresh"


def test_an_operator_that_counts_its_calls_is_named():
    calls = itertools.count()
    pipeline = Pipeline(NUMBERS).map(lambda _: {"n": next(calls)}, reads=(), writes=("n",), name="count")
    with pytest.raises(MisdeclaredOperator, match="operator count gives another sample when it is called again"):
        read(planned(pipeline))


def test_a_filter_that_lies_is_found_while_the_source_is_surveyed():
    pipeline = (
        Pipeline(NUMBERS)
        .map(double, reads=("a",), writes=("a",))
        .filter(lambda sample: sample["a"] > 5, reads=("a",), depends_on=(), name="big")
    )
    with pytest.raises(MisdeclaredOperator, match="operator big depends on double"):
        read(planned(pipeline, "big", "double"))


class _Dying:
    """A source in whose file a process dies once."""

    def __init__(self, marker: str):
        self.marker, self.own = marker, os.getpid()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number):
        if number == 11 and os.getpid() != self.own:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return {"a": np.int64(number)}

    def place(self, number):
        return f"record {number}"

    name = place

    def digest(self):
        return None


@pytest.mark.slow
def test_a_process_that_dies_is_started_again_and_gives_the_same_samples(tmp_path):
    pipeline = Pipeline(_Dying(str(tmp_path / "died"))).shuffle()
    plan = replace(plain_plan(pipeline), num_processes=2, num_ahead=2)
    samples = Samples(plan, 5)
    made = [int(sample["a"]) for sample in itertools.islice(in_order(samples, plan), 60)]
    assert (tmp_path / "died").exists()
    assert made == [int(samples[number]["a"]) for number in range(60)]


def kept_plan() -> InputPlan:
    pipeline = Pipeline(NUMBERS).filter(lambda sample: sample["a"] % 3 > 0, name="thirds").shuffle()
    return replace(plain_plan(pipeline), cache=CachePoint(1, "disk"))


def test_what_is_kept_is_found_again_and_told_from_others(tmp_path):
    plan = kept_plan()
    samples = [Samples(plan, 1, find_survey(plan, tmp_path, print))[number] for number in range(7)]
    (kept,) = tmp_path.iterdir()
    begun = kept.stat().st_mtime_ns
    again = Samples(plan, 1, find_survey(plan, tmp_path, print))
    assert [again[number] for number in range(7)] == samples
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [begun]
    other = Pipeline(NUMBERS).filter(lambda sample: sample["a"] % 3 > 1, name="thirds").shuffle()
    find_survey(replace(plain_plan(other), cache=plan.cache), tmp_path, print)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_sample_is_refused_and_a_damaged_index_made_again(tmp_path):
    plan = kept_plan()
    find_survey(plan, tmp_path, print)
    (kept,) = tmp_path.iterdir()
    content = bytearray((kept / "samples").read_bytes())
    content[-1] ^= 1
    (kept / "samples").write_bytes(content)
    with pytest.raises(DataError, match=rf"{kept}/samples is damaged \(sample \d\): remove the directory"):
        read(plan, 0) or [Samples(plan, 0, find_survey(plan, tmp_path, print))[number] for number in range(5)]
    (kept / "index").write_bytes(b"12345678")
    samples = Samples(plan, 0, find_survey(plan, tmp_path, print))
    assert sorted(samples[number]["a"] for number in range(5)) == [1, 2, 4, 5, 7]


def test_a_full_or_forbidden_directory_leaves_nothing_behind(tmp_path, monkeypatch):
    plan = kept_plan()
    (tmp_path / "file").write_text("")
    refused = r"Resources.cache_directory = '{}': samples cannot be kept there: {}"
    with pytest.raises(SettingError, match=refused.format(tmp_path / "file", "Not a directory")):
        find_survey(plan, tmp_path / "file", print)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    says_full = refused.format(tmp_path / "kept", "No space left on device")
    with monkeypatch.context() as filled:
        filled.setattr(store_module._Files, "add", full)
        with pytest.raises(SettingError, match=says_full):
            find_survey(plan, tmp_path / "kept", print)
    assert list((tmp_path / "kept").iterdir()) == []
    monkeypatch.setattr(store_module, "replace_file", full)
    with pytest.raises(SettingError, match=says_full):
        check_writable(tmp_path / "kept")


def test_a_field_that_cannot_be_kept_leaves_samples_unkept():
    pipeline = Pipeline(NUMBERS).map(lambda sample: {"f": sample["a"].bit_length}, reads=("a",), writes=("f",))
    plan = plan_input(pipeline, Resources(num_epochs=1e9), profile_input(pipeline))
    assert plan.cache is None or plan.cache.num_elements == 0
    assert Samples(plan, 0)[3]["f"]() == 2
