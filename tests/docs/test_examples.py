"""The programs and the notebook of ``examples`` run, one after the other, as the documents say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUNS = ("runs/examples/symi", "runs/examples/square-root")
SAYS = {
    "own_planner.py": r"0 of 12 workers down.*breadth first +\d+\n.*1 of 12 workers down.*adaptive +27\n",
    "train_from_python.py": r"60 iterations, loss 5\.\d\d to [2-4]\.\d\d\ntokens dropped: [\d.]+% in the first",
    "own_layer.py": r"step 50: loss 0\.3\d+, \d\.\d% dropped",
    "own_policy.py": r"square root: [\d.]+% of the tokens dropped",
    "compare_runs.py": r"symi, means of .* loss [\d.]+.*\n  expert \d of layer \d: .*\nsquare-root, .*\.html\n",
    "kill_a_process.py": r"failure of 1:0.*return of 1:0.*seconds: .*useful.*\n800 iterations are recorded, each once",
}
"""Output of each program, in the order in which they run: later ones read what earlier ones leave."""
NOTEBOOK = "look_at_a_run.ipynb"


def cells() -> list[str]:
    """The code of the notebook."""
    found = json.loads((EXAMPLES / NOTEBOOK).read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_every_example_is_run_and_documented():
    documented = (ROOT / "docs" / "tutorial.md").read_text()
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} == {*SAYS, NOTEBOOK}
    for name in (*SAYS, NOTEBOOK):
        assert f"](../examples/{name})" in documented


def test_the_notebook_is_kept_without_results():
    for cell in json.loads((EXAMPLES / NOTEBOOK).read_text())["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_the_examples_run_in_order(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    for name, says in SAYS.items():
        told = run(f"examples/{name}", *(RUNS if name == "compare_runs.py" else ()))
        assert re.search(says, told, re.DOTALL), told
    told = run("-c", "\n\n".join(cells()))
    shares = [float(share) for share in re.findall(r"([\d.]+)%", told)]
    assert told.startswith("60 iterations\n")
    # Replicas follow the iteration before more closely than their own, and either is better than never to move.
    assert shares[1] < shares[0] < shares[2]
