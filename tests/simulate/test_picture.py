"""The picture of a simulation: goodput that can be read, and bars that begin at zero."""

from statistics import mean

import numpy as np
import pytest

from swift.draw.loads import draw_simulation


def facts(goodput):
    """Output of `swift simulate` for two strategies, the second of which does not fit."""
    spent = {"useful": 30.0, "lost": 10.0}
    rows = [{"name": "swift", "goodput": goodput, "spent_s": spent}, {"name": "full", "goodput": None, "spent_s": None}]
    return {"hours": np.linspace(0, 12, len(goodput) + 1).tolist(), "strategies": rows}


def test_goodput_is_smoothed_over_a_tenth_of_the_time():
    """Up and down in turn: of each value and the ten around it, fewer near the ends, the mean; each value is faint."""
    goodput = [0.9 if number % 2 else 0.5 for number in range(100)]
    axes = draw_simulation(facts(goodput)).axes[0]
    (line,) = (line for line in axes.lines if line.get_gid() == "goodput-swift")
    expected = [mean(goodput[max(0, at - 5) : at + 6]) for at in range(100)]
    assert line.get_ydata() == pytest.approx(expected)
    assert np.ptp(line.get_ydata()) < 0.1
    (faint,) = axes.patches
    assert faint.get_data().values.tolist() == goodput
    assert faint.get_alpha() < 0.3
    low, high = axes.get_ylim()
    assert low == pytest.approx(min(expected) - 0.05)
    assert high > 1


def test_bars_begin_at_zero_and_add_up():
    bars = draw_simulation(facts([0.9] * 20)).axes[1]
    assert bars.get_xlim() == (0, 100)
    (useful, lost) = bars.patches
    assert (useful.get_x(), useful.get_width()) == (0, pytest.approx(75))
    assert (lost.get_x(), lost.get_width()) == (pytest.approx(75), pytest.approx(25))
    assert [text.get_text() for text in bars.texts] == ["out of memory"]
