"""The position of training after some time is what going through its iterations one by one gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift.simulate.engine import position
from swift.simulate.strategies import IterationTiming, Saves


def one_by_one(pace, elapsed_s):
    """(iterations, partial_s, saving_s, save_left_s, saves begun), by hand."""
    saves, time_s, done, saving_s, begun, upcoming = pace.saves, 0.0, 0, 0.0, [], list(pace.saves.first)
    while True:
        for _ in range(upcoming.pop(0) if upcoming else saves.every):
            if time_s + pace.iteration_s > elapsed_s + 1e-9:
                return done, max(0.0, elapsed_s - time_s), saving_s, 0.0, begun
            time_s, done = time_s + pace.iteration_s, done + 1
        if time_s + saves.stall_s > elapsed_s + 1e-9:
            return done, 0.0, saving_s + max(0.0, elapsed_s - time_s), saves.stall_s - (elapsed_s - time_s), begun
        time_s, saving_s = time_s + saves.stall_s, saving_s + saves.stall_s
        begun.append(done)


@given(
    st.sampled_from([0.5, 2.0, 7.3]),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.25, 3.0]),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(0, 5),
    st.integers(0, 400).map(lambda quarter: quarter / 4 + 0.03),
)
@settings(max_examples=400, deadline=None)
def test_the_position_is_that_of_every_iteration_run(iteration_s, every, stall_s, first, lag, elapsed_s):
    pace = IterationTiming(iteration_s, Saves(every, stall_s, min(lag, every), tuple(first)))
    done, partial_s, saving_s, left_s, begun = one_by_one(pace, elapsed_s)
    at = position(pace, elapsed_s)
    assert at.iterations == done
    assert (at.partial_s, at.saving_s, at.save_left_s) == pytest.approx((partial_s, saving_s, left_s), abs=1e-6)
    restorable = [save for save in begun[-2:] if done - save >= pace.saves.lag or save != begun[-1]]
    assert at.saved == (restorable[-1] if restorable else 0)


def test_without_saves_nothing_can_be_restored():
    at = position(IterationTiming(2.0), 7.0)
    assert (at.iterations, at.partial_s, at.saved, at.stored) == (3, 1.0, 0, 0)


def test_storage_is_whole_one_interval_later():
    pace = IterationTiming(1.0, Saves(1, lag=1, storage_every=5))
    assert [position(pace, seconds).stored for seconds in (4.0, 9.5, 10.0, 14.0, 15.0)] == [0, 0, 5, 5, 10]
    assert position(pace, 14.0).saved == 13
