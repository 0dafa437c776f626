"""The faults of a campaign are determined by its seed alone; its record continues where it ended."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from faults.campaign import KINDS
from faults.episode import Verdict
from faults.record import Record
from faults.shapes import SHAPES
from faults.summary import FAMILIES, rewritten, table
from faults.volleys import Deck

ROOT = Path(__file__).parents[2]


def run_of(shape="square"):
    place = SimpleNamespace(is_private=True)
    return SimpleNamespace(
        shape=SHAPES[shape], place=place, disk=object(), shim=None, network=None, temporary=None, tasks=None
    )


def volleys(seed, number):
    rng = Random(seed)
    deck, run = Deck(list(KINDS.values()), rng), run_of()
    return [deck.volley(run) for _ in range(number)]


def test_the_same_seed_gives_the_same_faults():
    assert volleys(7, 40) == volleys(7, 40)
    assert volleys(7, 40) != volleys(8, 40)


def test_every_kind_that_fits_comes_before_one_comes_again():
    run = run_of()
    fitting = {name for name, kind in KINDS.items() if kind.fits(run)}
    dealt = [fault.kind for volley in volleys(3, 60) for fault in volley]
    assert set(dealt[: len(fitting)]) == fitting
    assert "io-error" not in fitting  # it has no shim


def test_what_ends_a_life_comes_last_and_what_excludes_each_other_does_not_come_together():
    for volley in volleys(5, 300):
        kinds = [KINDS[fault.kind] for fault in volley]
        assert not any(kind.ends for kind in kinds[:-1])
        groups = [kind.group for kind in kinds if kind.group]
        assert len(groups) == len(set(groups))
        assert 1 <= len(volley) <= 4


def test_faults_can_be_written_as_json():
    for kind in KINDS.values():
        drawn = kind.draw(Random(1), run_of())
        assert json.loads(json.dumps(drawn)) == drawn


def test_a_record_goes_on_after_its_last_seed(tmp_path):
    record, (volley, *_) = Record(tmp_path / "faults.jsonl"), volleys(1, 1)
    assert record.next_seed(5) == 5
    record.add(Verdict(volley, [], 1.5, {"step": 40}), seed=6, commit="abc")
    assert record.next_seed(5) == 7
    assert record.next_seed(100) == 100
    lines = list(record.lines())
    assert [line["kind"] for line in lines] == [fault.kind for fault in volley]
    assert {line["outcome"] for line in lines} == {"ok"}


@pytest.mark.parametrize("complaints", [[], ["it hangs"]])
def test_a_verdict_shows_in_the_summary(complaints):
    line = {"kind": "kill-member", "outcome": "wrong" if complaints else "ok", "seconds": 2.0, "commit": "abc"}
    lines = [line, {**line, "kind": "rival", "outcome": "ok"}]
    right = 0 if complaints else 1
    assert f"| kill-member | 1 | {right} |" in table(lines)
    assert f"| abc | 2 | {1 - right} |" in table(lines)
    text = rewritten("before\n<!-- faults -->\nold\n<!-- end -->\nafter", lines)
    (row,) = [row for row in text.splitlines() if "`kill-member`" in row]
    assert f" | 1 | {right} |" in row
    assert f"| **all** |  | 2 | {1 + right} |" in text
    assert "old" not in text
    assert text.endswith("<!-- end -->\nafter")


def test_every_kind_is_in_one_row_of_the_short_table():
    assert sorted(kind for family in FAMILIES for kind in family.kinds) == sorted(KINDS)


def test_the_table_of_the_document_is_that_of_the_kept_record():
    text = (ROOT / "docs" / "faults.md").read_text()
    lines = list(Record(ROOT / "experiments" / "results" / "faults.jsonl").lines())
    assert lines
    assert rewritten(text, lines) == text
