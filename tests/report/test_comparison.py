import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from swift.errors import SettingError
from swift.report.compare import comparison_rows, comparison_table, run_labels
from swift.runlog.files import Metrics
from swift.runlog.reading import Run, steps_to_target


def plain_run(losses, name="symi", summary=(), **columns):
    """A run with the given losses; ``columns`` hold one value per step."""
    steps = range(1, len(losses) + 1)
    metrics = [{"step": step, "loss": loss} for step, loss in zip(steps, losses, strict=True)]
    for key, values in columns.items():
        for record, value in zip(metrics, values, strict=True):
            record[key] = value
    return Run(Path("runs") / name, name, "", Metrics.of(metrics), [], {"placement": "symi"} | dict(summary))


def rendered(runs):
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table(runs))
    return console.file.getvalue()


def test_a_row_is_what_was_computed_by_hand():
    run = plain_run(
        losses=[9.0, 9.0, *range(10, 0, -1)],  # The mean of the last 10 is 5.5, that of the first 10 is 7.0.
        tokens_routed=[100] * 12,
        tokens_dropped=[0] * 6 + [50] * 6,
        step_ms=[9000.0, 5.0, 5.0] + [10.0, 20.0, 30.0] * 3,
        validation_loss=[None] * 5 + [4.0] + [None] * 5 + [3.5],
        summary={"target_loss": 6.5},
    )
    assert comparison_rows([run]) == [
        {
            "name": "symi",
            "placement": "symi",
            "final_loss": 5.5,
            "dropped_percent": 25.0,
            # Means over 10 steps: 7.0 at step 10, 6.4 at step 11.
            "steps_to_target": 11,
            "median_step_ms": 20.0,
            "discarded_percent": None,
            "validation_loss": 3.5,
            "validation_bits_per_byte": None,
        }
    ]


def test_a_run_that_never_gets_to_the_target_is_shown_with_a_dash():
    run = plain_run([5.0] * 20, summary={"target_loss": 4.0})
    assert comparison_rows([run])[0]["steps_to_target"] is None
    cells = rendered([run]).splitlines()[-2].split()
    assert cells == ["symi", "symi", "5.000", "-", "-", "-", "-"]


def test_a_run_without_routed_tokens_has_no_share_of_dropped_ones():
    run = plain_run([5.0] * 4, tokens_routed=[0] * 4, tokens_dropped=[0] * 4)
    assert comparison_rows([run])[0]["dropped_percent"] is None


def test_a_run_of_one_step():
    run = plain_run([5.0], tokens_routed=[8], tokens_dropped=[2], step_ms=[900.0], summary={"target_loss": 9.0})
    row = comparison_rows([run])[0]
    assert (row["final_loss"], row["dropped_percent"]) == (5.0, 25.0)
    assert (row["steps_to_target"], row["median_step_ms"], row["validation_loss"]) == (None, None, None)


def test_a_run_that_has_not_begun():
    run = Run(Path("runs/new"), "new", "", Metrics.of([]), [], None)
    row = comparison_rows([run])[0]
    assert row.pop("name") == "new"
    assert set(row.values()) == {None}


def test_a_run_whose_loss_was_not_finite_has_no_final_loss():
    run = plain_run([5.0] * 11 + [None], summary={"target_loss": 9.0})
    row = comparison_rows([run])[0]
    assert (row["final_loss"], row["steps_to_target"]) == (None, 10)


def test_the_step_to_the_target_is_the_logged_one():
    run = plain_run([1.0] * 10, summary={"target_loss": 1.0}, step=range(101, 111))
    assert comparison_rows([run])[0]["steps_to_target"] == 110


def test_steps_to_target_takes_the_running_mean_and_not_one_step():
    losses = np.array([5.0] * 9 + [1.0] + [3.0] * 20)
    assert steps_to_target(losses, None) is None
    assert steps_to_target(losses, 4.6) == 10
    assert (
        steps_to_target(losses, 3.0) == 18
    )  # Two of 5, one of 1 and seven of 3 are a mean of 3.2; one of 5 less: 3.0.
    assert steps_to_target(losses, 2.7) is None
    assert steps_to_target(losses[:9], 9.0) is None


def test_odd_names_are_shown_as_they_are():
    assert "[red]x[/red] & <b>" in rendered([plain_run([1.0], name="[red]x[/red] & <b>")])


def test_runs_of_one_name_are_told_apart_by_their_directories():
    runs = [plain_run([1.0], name="a"), plain_run([1.0], name="b")]
    assert run_labels(runs) == ["a", "b"]
    twins = [Run(run.path, "demo", "", Metrics.of([]), [], None) for run in runs]
    assert run_labels(twins) == [f"demo ({Path('runs/a')})", f"demo ({Path('runs/b')})"]


def test_a_metric_that_is_no_number_is_told():
    with pytest.raises(SettingError, match=r"loss of step 1.*must be a number"):
        comparison_rows([plain_run(["much"])])


def test_no_number_is_cut_in_a_terminal_of_80_columns():
    run = plain_run(
        losses=[12.3456] * 40,
        name="a-run-with-a-name-that-is-long",
        tokens_routed=[10_000] * 40,
        tokens_dropped=[9_999] * 40,
        step_ms=[1_234_567.8] * 40,
        validation_loss=[12.3456] * 40,
        summary={"placement": "flexmoe", "target_loss": 13.0},
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison_table([run]))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = [word for line in lines for word in line.split()]
    assert [words.count(number) for number in ("12.346", "99.99", "10", "1,234,567.8")] == [2, 1, 1, 1]
