"""What is left to do in the directories of a comparison's runs."""

import json

import pytest

from swift.cli import standing


@pytest.mark.parametrize(("last", "is_diverged"), [("non_finite", True), ("interrupt", False)])
def test_plans_are_not_parsed(tmp_path, monkeypatch, last, is_diverged):
    events = [{"event": "start"}, {"event": last}, *[{"event": "plan", "plan": "x" * 9999}] * 3, {"event": "other"}]
    lines = [json.dumps({"step": 1} | event) + "\n" for event in events]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    parse, parsed = standing.parse_object, []
    monkeypatch.setattr(standing, "parse_object", lambda line: parsed.append(len(line)) or parse(line))
    assert standing._has_diverged(tmp_path) == is_diverged
    assert max(parsed) < 1000
