"""Files that commands write: their own of an earlier time are replaced, and nobody else's."""

import json
import os

import numpy as np
import pytest
from matplotlib.figure import Figure

from swift.cli.values import PAGE, PICTURE, PLACEMENT, PLAN, RESULTS, check_output
from swift.errors import SettingError
from swift.runlog.reading import check_new_run

FOREIGN = {
    "mine.gin": b"Experiment.num_steps = 3\n",
    "tasks.jsonl": b'{"question": "a", "answer": "b"}\n',
    "table.json": b'{"accuracy": 0.5}\n',
    "photo.png": b"\x89PNG\r\n\x1a\n" + bytes(99),
    "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "page.html": b"<!DOCTYPE html><html><head><title>My group</title></head></html>",
    "notes.txt": b"3 pipelines were laid, 2 stages each\n",
    "binary": bytes(range(256)),
    "empty": b"",
}
PLANNED = ("plan", "--pipelines", "2", "--stages", "2", "--microbatches", "2")


@pytest.fixture
def foreign(tmp_path):
    """A directory with files of somebody's, by name."""
    for name, content in FOREIGN.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "loads.npy", np.ones((2, 8)))
    np.save(tmp_path / "labels.npy", np.ones(8, np.int32))
    return tmp_path


@pytest.mark.parametrize("kind", [PAGE, PICTURE, PLACEMENT, PLAN, RESULTS], ids=lambda kind: kind.words)
def test_nobodys_file_is_replaced_by_whatever_name(foreign, kind, monkeypatch):
    monkeypatch.chdir(foreign)
    here = foreign.relative_to(foreign)
    for name in (*FOREIGN, "loads.npy", "labels.npy"):
        (foreign / f"link-{name}").symlink_to(name)
        os.link(foreign / name, foreign / f"hard-{name}")
        for path in (foreign / name, here / name, foreign / f"link-{name}", foreign / f"hard-{name}"):
            with pytest.raises(SettingError, match=f"exists and is not {kind.words}; choose another name"):
                check_output("--out", path, kind)
    (foreign / "to-nothing").symlink_to("nothing")
    for path, reason in {"": "is a directory", "to-nothing": "is a link to nothing", "no/x": "no directory no"}.items():
        with pytest.raises(SettingError, match=reason):
            check_output("--out", here / path, kind)
    check_output("--out", foreign / "new", kind)


@pytest.mark.parametrize(("dpi", "is_own"), [(160, True), (100, False)])
def test_a_picture_that_an_earlier_version_drew_is_replaced(tmp_path, dpi, is_own):
    """These had no text that says what drew them."""
    path = tmp_path / "plot.png"
    Figure().savefig(path, dpi=dpi, metadata={"Software": None})
    assert b"Matplotlib" not in path.read_bytes()
    for kind in (PICTURE, PLAN):
        if is_own:
            check_output("--plot", path, kind)
            continue
        with pytest.raises(SettingError, match="exists and is not"):
            check_output("--plot", path, kind)


def test_an_input_is_never_an_output(foreign):
    read = foreign / "loads.npy"
    np.save(read, np.zeros((1, 2, 3), np.int32))  # such as the command writes
    check_output("--out", read, PLACEMENT)
    (foreign / "link.npy").symlink_to("loads.npy")
    os.link(read, foreign / "hard.npy")
    for name in ("loads.npy", "link.npy", "hard.npy"):
        with pytest.raises(SettingError, match=r"is read by this command, as .*loads.npy; choose another name"):
            check_output("--out", foreign / name, PLACEMENT, [read])


def test_a_command_replaces_its_own_file_and_refuses_another(tell, foreign):
    loads = str(foreign / "loads.npy")
    placed = ("place", loads, "--ranks", "4", "--slots", "3")
    outputs = {
        "plan.txt": (*PLANNED, "--out"),
        "plan.json": (*PLANNED, "--out"),
        "plan.svg": (*PLANNED, "--out"),
        "trace.json": (*PLANNED, "--format", "trace", "--out"),
        "failed.txt": (*PLANNED, "--fail", "1:1", "--adapt", "reroute", "--out"),
        "slots.npy": (*placed, "--out"),
        "ranks.png": (*placed, "--plot"),
    }
    for name, words in outputs.items():
        for _ in range(2):
            told = tell(*words, str(foreign / name))
            assert (told.code, told.err) == (0, ""), name
    for name, words in {
        "mine.gin": (*PLANNED, "--format", "text", "--out"),
        "table.json": (*PLANNED, "--out"),
        "drawing.svg": (*PLANNED, "--out"),
        "loads.npy": (*placed, "--out"),
        "labels.npy": (*placed, "--out"),
        "photo.png": (*placed, "--plot"),
    }.items():
        before = (foreign / name).read_bytes()
        told = tell(*words, str(foreign / name))
        assert (told.code, told.out, told.err.count("\n")) == (2, "", 1), name
        assert "choose another name" in told.err
        assert (foreign / name).read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "class_counts.bin", "report.html", "checkpoints/step-00000003/a"])
def test_a_run_begins_in_no_directory_with_files_that_it_would_replace(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{"model_type": "mixtral"}')
    with pytest.raises(SettingError, match="choose another directory"):
        check_new_run(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "notes.md").write_text("of somebody's, in the way of nothing")
    if "/" not in name:
        (tmp_path / "config.json").write_text(json.dumps({"version": 1, "experiment": {}}))  # a start that broke off
        check_new_run(tmp_path)


WITH_PATHS = (
    ("train", "x.gin", "--run-dir"),
    ("launch", "x.gin", "--processes", "2", "--run-dir"),
    ("compare", "x.gin", "--run-dir"),
    ("report", "run", "--out"),
    ("export", "run", "--out"),
    ("import", "m", "--out"),
    (*PLANNED, "--out"),
    (*PLANNED, "--store"),
    ("checkpoint", "verify"),
)


@pytest.mark.parametrize("words", WITH_PATHS, ids=lambda words: words[0])
def test_a_url_is_refused_at_once(tell, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for url in ("gs://bucket/runs/one", "s3://bucket", "file:///tmp/x.svg", "https://host/x.json"):
        told = tell(*words, url)
        assert (told.code, told.out, told.new) == (2, "", [])
        assert told.err.count("\n") == 1
        assert f"{url!r}: is a URL" in told.err
