"""Colours mean one thing, and can be told from the ground and read, in light and in dark."""

import re
from dataclasses import dataclass, replace

import pytest

from swift.config.experiment import Experiment
from swift.config.stored import write_config
from swift.data.config import DataConfig
from swift.data.sources import InMemory
from swift.draw import style
from swift.draw.charts import layer_colors
from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.report.compare import comparison_rows, run_styles
from swift.simulate.registry import STRATEGIES
from tests.report.contrast import contrast, text_colors


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(scheme):
    colors = text_colors()[scheme]
    for text in ("ink", "faint", "focus"):
        for ground in ("ground", "card"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_lines_can_be_told_from_the_ground(scheme):
    own = (style.POLICY_COLORS, style.STRATEGY_COLORS, style.CHECKPOINT_COLORS, style.MOMENT_COLORS)
    used = {color for colors in own for color in colors.values()} | {*style.SPARE_COLORS, *style.EXPERT_COLORS}
    used |= {color for number in (1, 2, 5, 60) for color in layer_colors(number)}
    shown = (lambda color: style.ON_DARK.get(color, color)) if scheme else (lambda color: color)
    for color in used:
        assert contrast(shown(color), shown(style.GROUND)) >= 3, color


def test_every_policy_and_strategy_has_a_colour_of_its_own():
    for policy in (Symi(), Static(), Packed(), MinMax(), *(FlexMoE(every) for every in (10, 50, 100))):
        (color,) = style.colors_of([policy.name], style.POLICY_COLORS)
        assert color == style.POLICY_COLORS[re.sub(r"[()]", "", policy.name)]
    for own, names in ((style.POLICY_COLORS, style.POLICY_COLORS), (style.STRATEGY_COLORS, STRATEGIES)):
        colors = [own[name] for name in names if name != "flexmoe"]
        assert len({*colors}) == len(colors)


def test_a_run_has_the_colour_of_its_policy_wherever_it_stands(make_run):
    symi, static = make_run("runs/a", 3), make_run("runs/b", 3, policy="static")
    assert [one.color for one in run_styles([static, symi])] == [
        style.POLICY_COLORS["static"],
        style.POLICY_COLORS["symi"],
    ]


def test_a_run_without_a_summary_has_the_colour_of_its_policy(make_run, tmp_path):
    """It is in progress, or was stopped; its configuration says its policy."""
    policies = {"static": Static(), "every50": FlexMoE(50), "symi": Symi(), "mine": Mine()}
    runs = []
    for name, policy in policies.items():
        experiment = Experiment(placement=policy, data=DataConfig(InMemory(["a text", "another"])))
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, experiment)
        runs.append(replace(make_run(tmp_path / name, 3), summary=None))
    own = [style.POLICY_COLORS[name] for name in ("static", "flexmoe50", "symi")]
    assert [one.color for one in run_styles(runs)][:3] == own
    assert [row["placement"] for row in comparison_rows(runs)] == ["static", "flexmoe(50)", "symi", "Mine"]


@dataclass(frozen=True)
class Mine(Symi):
    """A policy of the user's own."""


def test_many_runs_of_one_policy_differ(make_run):
    styles = run_styles([make_run(f"runs/{index}", 2) for index in range(12)])
    assert len({(one.color, one.line) for one in styles}) == 12
    assert styles[0].color == style.POLICY_COLORS["symi"]
