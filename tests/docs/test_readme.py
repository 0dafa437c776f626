"""The README is short, and has what a reader looks for first."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """Text below a heading."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_read_in_a_few_minutes_and_has_a_picture():
    assert len(TEXT.encode()) <= 6 * 1024
    (picture,) = re.findall(r"!\[.+\]\((.+)\)", TEXT.partition("\n## ")[0])
    assert (ROOT / picture).exists()
    assert "It is for researchers" in TEXT.partition("\n## ")[0]


def test_it_begins_with_two_commands_and_goes_on_with_five():
    assert re.findall(r"^    (make \w+)", section("Two commands"), re.MULTILINE) == ["make demo", "make test"]
    assert len(re.findall(r"^    python -m swift ", section("The next five"), re.MULTILINE)) == 5


def test_it_says_what_runs_where():
    head, _, *rows = [line for line in section("What runs where").splitlines() if line.startswith("|")]
    assert head == "| | CPU | GPU | TPU |"
    words = "tested", "compiled", "not tried", "not yet", "need no JAX"
    for row in rows:
        _, _, *cells, _ = row.split("|")
        assert all(not cell.strip() or any(word in cell for word in words) for cell in cells), row
        assert any(cell.strip() for cell in cells), row
