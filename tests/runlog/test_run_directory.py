import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest

from swift.errors import SettingError
from swift.runlog.files import ranges_text
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory

CONFIG = """# Parameters for Experiment:
# ==============================
Experiment.num_steps = 10
Experiment.seed = 1
Experiment.sizes = \\
    [1,
     2]
"""


@pytest.fixture
def path(tmp_path):
    """A run of three steps, an event and a summary."""
    with RunDirectory.create(tmp_path / "run", CONFIG) as directory:
        for step in (1, 2, 3):
            directory.log_step({"step": step, "loss": 4.0 - step})
        directory.log_event("checkpoint", 3, path="checkpoints/3")
        directory.write_summary({"name": "demo", "num_steps": 3})
    return tmp_path / "run"


def said(records):
    """Records without the time, which each has to have."""
    assert all(datetime.fromisoformat(record["time"]).tzinfo == UTC for record in records)
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def test_a_step_with_a_damaged_digit_costs_no_memory(path):
    """All steps up to it would be some 10^12; and no integer of 64 bits holds the second."""
    lines = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(lines + b'{"step": 1234567890123}\n')
    assert ranges_text(read_run(path).metrics.missing) == "4-1234567890122"
    (path / "metrics.jsonl").write_bytes(lines + b'{"step": 123456789012345678901234567890}\n')
    with pytest.raises(SettingError, match=r"line 4.*must be above 3"):
        read_run(path)


def contents(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_run_is_read_as_it_was_written(path):
    run = read_run(path)
    assert (run.path, run.name, run.config_text) == (path, "demo", CONFIG)
    assert said(run.metrics) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    (event,) = run.events
    assert (event["event"], event["step"], event["path"]) == ("checkpoint", 3, "checkpoints/3")
    assert event["time"].endswith("+00:00")
    assert run.summary == {"name": "demo", "num_steps": 3}
    assert [file.parent.name for file in path.rglob("*tfevents*")] == ["tensorboard"]
    assert not list(path.glob(".*"))


def test_a_run_that_has_not_ended_is_named_after_its_directory(tmp_path):
    with RunDirectory.create(tmp_path / "some", "") as directory:
        directory.log_step({"step": 1})
        run = read_run(tmp_path / "some")
    assert (run.name, run.summary, said(run.metrics)) == ("some", None, [{"step": 1}])


def test_numpy_values_are_written_and_numbers_that_are_not_finite_become_null(tmp_path):
    with RunDirectory.create(tmp_path, "") as directory:
        directory.log_step(
            {
                "step": np.int64(1),
                "loss": np.float32(0.5),
                "pairs": np.array([[1, 2], [3, 4]]),
                "shares": np.array([0.5, math.inf]),
                "grad_norm": math.nan,
                "nested": {"largest": (np.float32(math.inf), 1)},
            }
        )
        directory.log_event("failure", 1, lost_ms=np.float64(math.nan))
        directory.write_summary({"final_loss": np.float64(math.nan)})
    expected = {"step": 1, "loss": 0.5, "pairs": [[1, 2], [3, 4]], "shares": [0.5, None], "grad_norm": None}
    assert said([json.loads((tmp_path / "metrics.jsonl").read_text())]) == [
        expected | {"nested": {"largest": [None, 1]}}
    ]
    run = read_run(tmp_path)
    assert said(run.metrics) == [expected | {"nested": {"largest": [None, 1]}}]
    assert run.events[0]["lost_ms"] is None
    assert run.summary == {"final_loss": None}


def test_each_step_is_on_disk_at_once(tmp_path):
    with RunDirectory.create(tmp_path, "") as directory:
        directory.log_step({"step": 1})
        directory.log_event("failure", 1)
        assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
        assert (tmp_path / "events.jsonl").read_text().endswith("}\n")


def test_create_refuses_a_directory_that_holds_a_run_and_changes_nothing(path):
    before = contents(path)
    with pytest.raises(SettingError, match=r"--run-dir.*add --resume"):
        RunDirectory.create(path, "other")
    assert contents(path) == before


def test_create_refuses_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match="--run-dir"):
        RunDirectory.create(tmp_path / "file", "")
    assert (tmp_path / "file").read_text() == "mine"


def test_create_accepts_a_directory_with_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDirectory.create(tmp_path, "a = 1\n").close()
    assert read_run(tmp_path).config_text == "a = 1\n"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resume_drops_later_steps_and_keeps_events(path):
    with RunDirectory.resume(path, CONFIG, step=2) as directory:
        assert read_run(path).summary is None
        directory.log_step({"step": 3, "loss": 9.0})
        directory.log_event("resume", 2)
    run = read_run(path)
    assert [record["loss"] for record in run.metrics] == [3.0, 2.0, 9.0]
    assert [event["event"] for event in run.events] == ["checkpoint", "resume"]


def test_resume_truncates_torn_last_lines(path):
    for name in ("metrics.jsonl", "events.jsonl"):
        with (path / name).open("a") as file:
            file.write('{"step": 4, "lo')
    assert [record["step"] for record in read_run(path).metrics] == [1, 2, 3]
    with RunDirectory.resume(path, CONFIG, step=3) as directory:
        directory.log_step({"step": 4})
        directory.log_event("resume", 3)
    run = read_run(path)
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    assert [event["event"] for event in run.events] == ["checkpoint", "resume"]


def test_resume_works_where_the_run_died_before_its_first_step(tmp_path):
    (tmp_path / "config.gin").write_text(CONFIG)
    with RunDirectory.resume(tmp_path, CONFIG, step=0) as directory:
        directory.log_step({"step": 1})
    assert said(read_run(tmp_path).metrics) == [{"step": 1}]


@pytest.mark.parametrize("exists", [False, True])
def test_resume_refuses_where_there_is_no_run(tmp_path, exists):
    if exists:
        (tmp_path / "run").mkdir()
    with pytest.raises(SettingError, match=r"--run-dir.*holds no run"):
        RunDirectory.resume(tmp_path / "run", CONFIG, step=0)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG.replace("seed = 1", "seed = 2"), "`Experiment.seed = 1`, this configuration has `Experiment.seed = 2`"),
        (CONFIG.replace(" 2]", " 3]"), r"has `Experiment.sizes = \\ \[1, 3\]`"),
        (CONFIG.replace("Experiment.seed = 1\n", ""), "has `no Experiment.seed`"),
        (CONFIG + "Experiment.new = 1\n", "the run has `no Experiment.new`"),
    ],
)
def test_resume_refuses_another_configuration_and_changes_nothing(path, config, message):
    before = contents(path)
    with pytest.raises(SettingError, match=message) as refusal:
        RunDirectory.resume(path, config, step=1, may_change=["Experiment.num_steps"])
    assert "\n" not in str(refusal.value)
    assert contents(path) == before


def test_resume_accepts_settings_that_may_change_and_comments(path):
    config = CONFIG.replace("num_steps = 10", "num_steps = 20").replace("# ===", "# ---")
    with pytest.raises(SettingError, match="num_steps"):
        RunDirectory.resume(path, config, step=3)
    RunDirectory.resume(path, config, step=3, may_change=["Experiment.num_steps"]).close()
    assert read_run(path).config_text == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"ste\n{"step": 3}\n', "line 2.*not a JSON object"),
        ("metrics.jsonl", '{"step": 1}\n[2]\n', "line 2.*not a JSON object"),
        ("metrics.jsonl", '{"step": 2}\n{"step": 2}\n', "line 2.*must be above 2"),
        ("metrics.jsonl", '{"loss": 2}\n', "line 1.*step None"),
        ("events.jsonl", "\n{}\n", "line 1.*not a JSON object"),
        ("summary.json", "{", "summary.*not a JSON object"),
        ("config.gin", b"\xff\n", "not UTF-8"),
    ],
)
def test_damage_is_told(path, name, content, message):
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match=message):
        read_run(path)


def test_steps_have_to_rise(tmp_path):
    with RunDirectory.create(tmp_path, "") as directory:
        directory.log_step({"step": 2})
        with pytest.raises(AssertionError, match="step 2 was logged after step 2"):
            directory.log_step({"step": 2})


def test_close_may_be_called_twice(tmp_path):
    with RunDirectory.create(tmp_path, "") as directory:
        directory.close()


def test_a_plan_is_written_once_and_read_wherever_it_is_named(tmp_path):
    first, second = {"round": [1] * 1000}, {"round": [2] * 1000}
    with RunDirectory.create(tmp_path, "") as directory:
        for step, plan in enumerate((first, second, first, first)):
            directory.log_event("plan", step, failed=[f"0:{step}"], plan=plan)
    assert (tmp_path / "events.jsonl").stat().st_size < 2.5 * len(json.dumps(first))
    with RunDirectory.resume(tmp_path, "", step=0) as directory:
        directory.log_event("plan", 4, plan=second)
    events = read_run(tmp_path).events
    assert [event["plan"] for event in events] == [first, second, first, first, second]
    assert [event.get("failed") for event in events] == [["0:0"], ["0:1"], ["0:2"], ["0:3"], None]
    assert events[3]["plan"] is events[0]["plan"]
