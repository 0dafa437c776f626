"""Random traces."""

import pytest
from hypothesis import strategies as st

from swift.simulate.traces import Event, Trace


@st.composite
def draw_traces(draw, most_nodes=12, most_events=20):
    """Any trace: nodes that are there from the beginning or come later, go, and come back."""
    names = [f"node{index}" for index in range(draw(st.integers(1, most_nodes)))]
    live = {name for name in names if draw(st.booleans()) or draw(st.booleans())}
    events, time_s = [Event(0.0, "add", name) for name in names if name in live], 0.0
    for _ in range(draw(st.integers(0, most_events))):
        time_s += draw(st.sampled_from([0.0, 0.5, 3.0, 40.0, 333.3, 2000.0]))
        name = draw(st.sampled_from(names))
        events.append(Event(time_s, "remove" if name in live else "add", name))
        live ^= {name}
    return Trace(tuple(events), time_s + draw(st.sampled_from([1.0, 77.7, 5000.0])))


@pytest.fixture(scope="session")
def traces():
    return draw_traces
