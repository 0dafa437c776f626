"""Tables in terminals of any width: what is shown has every value whole."""

import io

import pytest
from rich.console import Console

from swift.terminal_table import TerminalTable

HEADINGS = ("run", "placement", "final loss (mean of last 10)", "tokens dropped (%)", "median step (ms)")
ROW = ("a-run-with-a-name-that-is-long", "flexmoe(50)", "1,012.345", "99.99", "1,234,567.8")


def shown(width, rows=(ROW,), headings=HEADINGS, texts=("run", "placement")):
    table = TerminalTable(headings, texts)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [200, 120, 80, 70, 60, 50, 40, 30, 20])
def test_no_value_is_lost_however_narrow_the_terminal_is(width):
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    assert {*ROW[2:]} <= {*text.split()}
    pieces = "".join(text.split())
    assert width < 80 or "flexmoe(50)" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in pieces


def test_a_row_without_room_is_a_list():
    assert [line.rstrip() for line in shown(40).splitlines()] == [
        "",
        "run: a-run-with-a-name-that-is-long",
        "placement: flexmoe(50)",
        "final loss (mean of last 10): 1,012.345",
        "tokens dropped (%): 99.99",
        "median step (ms): 1,234,567.8",
    ]


def test_before_that_the_space_between_columns_goes():
    assert "median step (ms):" not in shown(52)
    assert max(map(len, shown(52).splitlines())) <= 52


def test_a_table_without_rows_has_its_headings():
    assert "placement" in shown(80, rows=())


def test_control_characters_and_marks_are_shown_as_they_are():
    text = shown(120, rows=[("a\x1b[31m\nb", "[red]x[/red]", "1", "2", "3")], headings=("run\x07", *HEADINGS[1:]))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"a\x1b[31m\nb" in text
    assert "[red]x[/red]" in text
