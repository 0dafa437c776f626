"""The study of balancing: its figures against SciPy and NumPy, and runs that are in the record are not run again."""

import argparse
import json

import numpy as np
import pytest
import study_balance
from scipy import stats


def lines_of(steps):
    """Lines of a record: iterations to a loss of 2, by system, a seed each."""
    return [
        {"case": {"steps": 9, "balance": "none", "system": system, "seed": seed}, "steps_to": {"2": to}}
        for system, by_seed in steps.items()
        for seed, to in enumerate(by_seed)
    ]


def saved(monkeypatch, steps):
    monkeypatch.setattr(study_balance, "TARGETS", (2.0,))
    return study_balance.fewer_iterations(lines_of(steps), "none", "symi").get("2")


def test_iterations_saved_have_the_interval_of_a_t_test(monkeypatch):
    found = saved(monkeypatch, {"static": (100, 200, 150), "symi": (80, 150, 120)})
    shares = np.array([0.2, 0.25, 0.2])
    low, high = stats.ttest_1samp(shares, 0).confidence_interval(0.95)
    assert abs(found["mean"] - shares.mean()) < 1e-4
    assert abs(2 * found["plus_minus"] - (high - low)) < 2e-4
    assert (found["seeds"], found["of"]) == (3, 3)


def test_seeds_that_do_not_reach_a_target_are_left_out_and_counted(monkeypatch):
    found = saved(monkeypatch, {"static": (100, None), "symi": (50, 90)})
    assert found == {"mean": 0.5, "plus_minus": None, "seeds": 1, "of": 2}
    assert saved(monkeypatch, {"static": (None,), "symi": (90,)}) is None


def test_the_entropy_of_the_next_byte_is_that_of_a_table_of_n_grams():
    text = np.random.default_rng(0).choice([97, 98, 99], size=4000, p=[0.5, 0.3, 0.2]).tobytes()
    for known in range(4):
        table: dict[bytes, dict[int, int]] = {}
        for place in range(known, len(text)):
            row = table.setdefault(text[place - known : place], {})
            row[text[place]] = row.get(text[place], 0) + 1
        nats = sum(stats.entropy([*row.values()]) * sum(row.values()) for row in table.values()) / (len(text) - known)
        assert abs(study_balance.entropy_of_next_byte(text, known) - nats) < 1e-3


def test_a_run_that_is_in_the_record_is_not_run_again(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(study_balance, "run", lambda case, _: ran.append(case) or {"loss": 1.0})
    cases, record = list(study_balance.cases_of("table", 2)), tmp_path / "runs.jsonl"
    study_balance.fill(cases[:3], record, tmp_path)
    with record.open("ab") as file:
        file.write(b'{"case": cut off')
    study_balance.fill(cases, record, tmp_path)
    study_balance.fill(cases, record, tmp_path)
    assert ran == cases
    assert len(cases) == len(set(cases)) == 18
    assert json.loads(record.read_text().splitlines()[0])["case"] == {
        "steps": 150,
        "balance": "none",
        "system": "static",
        "seed": 0,
        "shape": "demo",
    }


class CutOffError(Exception):
    pass


def test_a_run_goes_on_from_its_last_checkpoint_and_one_without_begins_anew(monkeypatch, tmp_path):
    case, told = study_balance.Case(60, "none", "static", 0), []

    def train(_, options):
        told.append(options.resume)
        options.run_dir.mkdir(exist_ok=options.resume)
        (options.run_dir / "config.json").touch()
        if len(told) == 2:
            (options.run_dir / "checkpoints").mkdir()
        if len(told) < 3:
            raise CutOffError
        (options.run_dir / "summary.json").touch()

    monkeypatch.setattr(study_balance, "train", train)
    monkeypatch.setattr(study_balance, "checkpoint_steps", lambda path: [3] if path.exists() else [])
    monkeypatch.setattr(study_balance, "read_run", str)
    monkeypatch.setattr(study_balance, "figures_of", lambda run_dir: {"of": run_dir})
    for _ in range(2):
        with pytest.raises(CutOffError):
            study_balance.run(case, tmp_path / "case")
    found = study_balance.run(case, tmp_path / "case")
    assert told == [False, False, True]
    assert found == {"cpu_s": found["cpu_s"], "sittings": 2, "of": str(tmp_path / "case" / "run")}
    assert study_balance.run(case, tmp_path / "case") == found  # killed before it was recorded: it is not run again
    assert len(told) == 3


def test_the_directory_of_a_run_stays_until_its_line_is_there(monkeypatch, tmp_path):
    def run(_, directory):
        directory.mkdir(parents=True)
        return {"loss": 1.0}

    monkeypatch.setattr(study_balance, "run", run)
    monkeypatch.setattr(study_balance.os, "fsync", lambda _: (_ for _ in ()).throw(CutOffError))
    with pytest.raises(CutOffError):
        study_balance.fill([study_balance.Case(6, "none", "static", 0)], tmp_path / "runs.jsonl", tmp_path / "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be K/N with 1 <= K <= N"):
        study_balance.part(text)
