"""Records that other hosts begin: whatever these answer, or do not, the samples are those of this machine."""

import itertools
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from swift.data.encoding import encoded
from swift.data.pipeline import CachePoint, Pipeline, plain_plan
from swift.data.records import Rows
from swift.data.remote_records import handle_request
from swift.data.sample_checks import MisdeclaredOperator
from swift.data.sample_store import find_survey
from swift.data.samples import Samples
from swift.data.survey import in_order
from swift.input.optimizer import Resources, add_offload, profile_hosts
from swift.input.profile import HostsProfile, InputProfile, OperatorProfile, profile_input

ROWS = Rows([{"a": number, "b": "x" * (number % 4)} for number in range(20)])


def squared(sample):
    return {"a": sample["a"] ** 2}


def noisy(_, rng):
    return {"n": np.float32(rng.random())}


def pipeline(*functions) -> Pipeline:
    made = Pipeline(ROWS).drop_duplicates("a").filter(lambda sample: sample["b"] != "", reads=("b",), name="some")
    for function in functions or (squared,):
        made = made.map(function, reads=("a",), writes=("a",))
    return made.map(noisy, reads=(), writes=("n",), is_random=True).shuffle()


class Elsewhere:
    """A host in the same process, with a pipeline that may be another, or with answers of its own."""

    def __init__(self, one: Pipeline, answers=handle_request, num_workers: int = 1):
        self.pipeline, self.answers, self.num_workers = one, answers, num_workers
        self.requests, self.told = [], []

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        self.requests.append(json.loads(request))
        return "there", self.answers(self.pipeline, request)

    def tell(self, host: str, line: str) -> None:
        self.told.append(f"{host} {line}")


def read(one: Pipeline, hosts: Elsewhere | None, num: int = 40, **changes) -> list[dict]:
    plan = replace(plain_plan(one), **changes)
    samples = Samples(plan, 3, hosts=hosts)
    return [samples[number] for number in range(num)]


@pytest.mark.parametrize("num_offloaded", range(5))
def test_what_is_offloaded_runs_elsewhere_and_what_is_not_here(num_offloaded):
    calls = []

    def counted(sample):
        calls.append(sample["a"])
        return squared(sample)

    here, there = pipeline(counted), pipeline(squared)
    hosts = Elsewhere(replace(there, operators=tuple(replace(o, name=h.name) for o, h in both(there, here))))
    assert read(here, hosts, num_offloaded=num_offloaded) == read(there, None)
    assert bool(calls) == (num_offloaded < 3)
    assert {one["end"] for one in hosts.requests} <= {num_offloaded, min(num_offloaded, 2)}
    assert len(hosts.requests) == 20 + 40
    assert hosts.told == []


def both(there: Pipeline, here: Pipeline):
    return zip(there.operators, here.operators, strict=True)


def test_with_a_cache_records_are_begun_elsewhere_once(tmp_path):
    one = pipeline(squared)
    plan = replace(plain_plan(one), cache=CachePoint(3, "disk"), num_offloaded=3)
    hosts = Elsewhere(one)
    samples = Samples(plan, 3, find_survey(plan, tmp_path, print, hosts=hosts), hosts)
    assert [samples[number] for number in range(40)] == read(one, None)
    assert len(hosts.requests) == 20
    again = Samples(plan, 3, find_survey(plan, tmp_path, print, hosts=hosts), hosts)
    assert [again[number] for number in range(40)] == read(one, None)
    assert len(hosts.requests) == 20


def test_a_host_whose_operators_do_something_else_is_named():
    def cubed(sample):
        return {"a": sample["a"] ** 3}

    hosts = Elsewhere(pipeline(cubed))
    here = pipeline(squared)
    renamed = tuple(replace(there, name=one.name) for there, one in both(hosts.pipeline, here))
    hosts.pipeline = replace(hosts.pipeline, operators=renamed)
    with pytest.raises(MisdeclaredOperator, match=r"record \d+: input host there makes another sample of it"):
        read(here, hosts, num_offloaded=3, check_every=1)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda *_: b"", "the answer is none: "),
        (lambda *_: b"\x80\x04K\x01.", "the answer is none: "),
        (lambda *_: encoded({"reason": "no such file"}), "no such file"),
        (lambda *_: encoded({"num_done": 1, "names": [], "digests": b"", "took_s": 0.0}), "1 operators have run"),
        (lambda one, _: handle_request(one, b"{"), "JSONDecodeError"),
        (lambda one, _: handle_request(one, b'{"order": ["rm"]}'), "rm are not the operators of this pipeline"),
    ],
)
def test_what_a_host_cannot_answer_is_made_here_and_told(answers, said):
    hosts = Elsewhere(pipeline(), answers)
    assert read(pipeline(), hosts, num_offloaded=4) == read(pipeline(), None)
    assert hosts.told[0].startswith("there cannot make record 0: ")
    assert said in hosts.told[0]


def test_a_field_that_cannot_be_sent_stays_here():
    def method(sample):
        return {"a": sample["a"].bit_length}

    one = pipeline(method)
    hosts = Elsewhere(one)
    made = read(one, hosts, 4, num_offloaded=4)
    assert [sample["a"]() for sample in made] == [sample["a"]() for sample in read(one, None, 4)]
    assert "it cannot be sent: field 'a' is a builtin_function_or_method" in hosts.told[-1]


def test_an_operator_that_raises_does_so_here_too():
    def odd(sample):
        if sample["a"] == 5:
            raise ValueError("five is odd")
        return sample["a"] % 5 < 4

    one = Pipeline(ROWS, most_skipped=1).filter(odd, reads=("a",)).map(squared, reads=("a",), writes=("a",))
    hosts, plan = Elsewhere(one), replace(plain_plan(one), num_offloaded=2)
    samples = Samples(plan, 0, hosts=hosts)
    assert samples.found.skipped == ("record 5: operator odd: raises ValueError: five is odd",)
    assert samples.num_per_epoch == 15
    assert hosts.told == ["there cannot make record 5: operator odd: raises ValueError: five is odd"]


SLOW = HostsProfile(1, 0.5, (1e-4, 1e-9), (5e-5, 5e-10))
FAST = HostsProfile(8, 8.0, (1e-4, 1e-9), (5e-5, 5e-10))
FAR = HostsProfile(8, 8.0, (1e-4, 1e-3), (5e-5, 1e-3))


def profiled(*operators: tuple[float, float], num_records: int = 10_000) -> tuple[Pipeline, InputProfile]:
    """A pipeline and a profile of it: the seconds of each operator, and the bytes after it."""
    one = Pipeline(ROWS)
    for _ in operators:
        one = one.map(squared, reads=("a",), writes=("a",))
    names = [operator.name for operator in one.operators]
    each = [OperatorProfile(name, s, s, 100.0, size) for name, (s, size) in zip(names, operators, strict=True)]
    source = OperatorProfile("source", 1e-5, 1e-5, 0.0, 1000.0)
    return one, InputProfile(20, num_records, source, tuple(each))


@pytest.mark.parametrize(
    ("operators", "hosts", "end"),
    [
        ([(1e-2, 100.0)], FAST, 1),
        ([(1e-2, 100.0)], SLOW, None),
        ([(1e-2, 100.0)], FAR, None),  # the answer takes longer than making it
        ([(1e-5, 100.0)], FAST, None),  # so does the request
        ([(1e-2, 100.0), (1e-4, 1e7)], FAST, 1),  # what it makes large stays here
        ([(1e-3, 1e7), (1e-2, 100.0)], FAST, 2),
    ],
)
def test_operators_are_offloaded_as_far_as_it_pays(operators, hosts, end):
    one, profile = profiled(*operators)
    plan = add_offload(plain_plan(one), profile, Resources(num_epochs=1, hosts=hosts))
    assert plan.num_offloaded == end
    assert plan.reasons[-1].startswith("offload: all up to squared" if end else "offload: none; ")
    assert plan.num_threads == (8 if end else 0)


def test_what_cannot_be_sent_is_not_offloaded_and_what_is_kept_ends_it():
    one, profile = profiled((1e-2, 100.0), (1e-2, 100.0), (1e-2, 100.0))
    used = Resources(num_epochs=1, hosts=FAST)
    assert add_offload(plain_plan(one), replace(profile, unkept={3: "reason", 2: "reason"}), used).num_offloaded == 1
    kept = replace(plain_plan(one), cache=CachePoint(2, "memory"))
    assert add_offload(kept, profile, used).num_offloaded == 2
    few = replace(profile, num_records=20)
    assert add_offload(plain_plan(one), few, used).reasons == ("offload: none; 0.0753 s instead of 0.6 s",)
    assert add_offload(plain_plan(one), profile, Resources()) == plain_plan(one)


def test_hosts_are_profiled_by_the_records_and_an_echo():
    one = pipeline(squared)
    found = profile_hosts(Elsewhere(one, num_workers=3), one, profile_input(one))
    assert found is not None
    assert found.num_workers == 3
    assert found.speed > 0
    assert found.ask_s[0] > 0
    broken = Elsewhere(one, lambda *_: b"")
    assert profile_hosts(broken, one, profile_input(one)) is None


class Losing(Elsewhere):
    """A host that is lost after some answers."""

    def __init__(self, one: Pipeline, num_answers: int):
        super().__init__(one)
        self.num_answers = num_answers

    def ask(self, request: bytes) -> tuple[str, bytes] | None:
        if len(self.requests) == self.num_answers:
            self.num_workers = 0
        return super().ask(request) if self.num_workers else None


@pytest.mark.parametrize("num_answers", [0, 1, 7, 25])
def test_once_no_host_is_left_this_one_goes_on_with_its_own_threads(num_answers):
    def told(sample):
        return {"a": sample["a"] ** 2, "thread": threading.current_thread() is threading.main_thread()}

    one = Pipeline(ROWS).map(told, reads=("a",), writes=("a", "thread")).shuffle()
    hosts = Losing(one, num_answers)
    plan = replace(plain_plan(one), num_offloaded=1, num_threads=3, num_ahead=3, alone=(0, 0))
    made = list(itertools.islice(in_order(Samples(plan, 3, hosts=hosts), plan, hosts=hosts), 40))
    expected = list(itertools.islice(Samples(plain_plan(one), 3), 40))
    assert [sample["a"] for sample in made] == [sample["a"] for sample in expected]
    assert all(sample["thread"] for sample in made[num_answers + 6 :])
    assert not made[0]["thread"]


def test_a_plan_with_other_hosts_remembers_the_workers_without_them():
    one, profile = profiled((1e-2, 100.0), (1e-2, 100.0))
    before = replace(plain_plan(one), num_threads=1, num_processes=2)
    plan = add_offload(before, profile, Resources(hosts=FAST))
    assert (plan.num_threads, plan.num_processes, plan.num_offloaded is None) == (8, 0, False)
    assert replace(plan.without_hosts(), reasons=(), alone=(0, 0)) == before
