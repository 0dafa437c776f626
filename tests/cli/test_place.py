"""`swift place`: what a person and a program get, and how a mistake is told."""

import json
import pickle
from xml.etree import ElementTree

import numpy as np
import pytest


@pytest.fixture
def loads(tmp_path):
    """A file of two layers of eight experts."""
    path = tmp_path / "loads.npy"
    np.save(path, np.array([[80, 40, 20, 10, 5, 3, 1, 1], [10] * 8]))
    return path


def test_a_person_is_told_how_even_the_ranks_are(tell, loads):
    told = tell("place", str(loads), "--ranks", "4", "--slots", "3")
    assert (told.code, told.err, told.new) == (0, "", [])
    lines = told.out.splitlines()
    assert lines[0] == "8 experts of 2 layers in 4 ranks x 3 slots"
    assert lines[2].split() == ["layer", "static", "packed", "best", "split", "replicas", "of", "an", "expert"]
    before, after, split = map(float, lines[3].split()[1:4])
    assert before > after >= split - 0.001
    assert split < 1.1
    assert max(map(len, lines)) < 80


def test_a_program_gets_one_document_an_array_and_a_picture(tell, loads, tmp_path):
    out, plot = tmp_path / "placement.npy", tmp_path / "ranks.svg"
    told = tell(
        *("place", str(loads), "--ranks", "4", "--slots", "3", "--policy", "minmax", "--format", "json"),
        *("--out", str(out), "--plot", str(plot)),
    )
    assert (told.code, told.err) == (0, "")
    facts = json.loads(told.out)
    assert (facts["policy"], facts["num_ranks"], facts["slots_per_rank"], facts["num_experts"]) == ("minmax", 4, 3, 8)
    placement_LNS = np.load(out, allow_pickle=False)
    assert [layer["placement"] for layer in facts["layers"]] == placement_LNS.tolist()
    assert placement_LNS.shape == (2, 4, 3)
    for layer in facts["layers"]:
        for name in ("before", "after", "split"):
            assert sum(layer[name]["rank_loads"]) == pytest.approx(160 if layer["layer"] == 0 else 80, rel=1e-6)
    text = "".join(ElementTree.parse(plot).getroot().itertext())
    assert "svg" in plot.read_text()[:200]
    assert text is not None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ranks", "0", "--slots", "3"], "--ranks = 0: must be a whole number of at least 1"),
        (["--ranks", "2", "--slots", "3"], "--slots = 3: at least 4, for each of 8 experts"),
        (["--ranks", "4", "--slots", "3", "--policy", "paked"], "--policy = 'paked': did you mean packed?"),
        (["--ranks", "4", "--slots", "3", "--plot", "x.jpg"], "--plot = 'x.jpg': must end in .svg or .png"),
        (["--ranks", "4", "--slots", "3", "--out", "no/x.npy"], "cannot be written: there is no directory no"),
        (["--ranks", "4194304", "--slots", "3"], "--slots = 3: makes more than 1,048,576 slots with --ranks"),
    ],
)
def test_a_mistake_costs_a_line(tell, loads, arguments, line):
    told = tell("place", str(loads), *arguments)
    assert (told.code, told.out, told.new) == (2, "", [])
    assert line in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("content", ["missing", "text", "pickle", "three dims", "negative"])
def test_a_file_that_has_no_loads_costs_a_line_and_is_never_run(tell, tmp_path, content):
    path = tmp_path / "loads.npy"
    if content == "text":
        path.write_text("1 2 3")
    elif content == "pickle":
        path.write_bytes(pickle.dumps([1, 2]))
    elif content != "missing":
        np.save(path, np.ones((2, 2, 2)) if content == "three dims" else -np.ones(8))
    told = tell("place", str(path), "--ranks", "4", "--slots", "3")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"swift: LOADS.npy = '{path}': ")
    assert told.err.count("\n") == 1
