"""Real processes whose data are lost end together, with a checkpoint of the last iteration that all have.

A stream is not lost with a process: the others read on in it.
"""

import os

import numpy as np
import pytest

from tests.elastic.runs import (
    launched,
    left_behind,
    losses,
    newest_checkpoint,
    tell,
    wait_for_steps,
    whole,
    write_config,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def tokens(tmp_path):
    """The file of tokens that a run reads."""
    (np.arange(300_000) * 7919 % 250).astype("<u2").tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin"


def config_of(tokens):
    config = write_config(tokens.parent, (2, 1, 1), 10**6)
    with config.open("a") as file:
        file.write(f"DataConfig.source = @TokenFile()\nTokenFile.path = {str(tokens)!r}\n")
    return config


def test_a_token_file_that_shrinks_ends_the_run_with_a_checkpoint(tokens):
    config = config_of(tokens)
    with launched(config, "--prepare", "none") as process:
        wait_for_steps(process, config, 5)
        os.truncate(tokens, 1000)
        said = process.stderr.read()
        assert process.wait(timeout=60) == 3, said
    last = said.splitlines()[-1]
    done = len(losses(config.parent / "run"))
    assert "tokens.bin has shrunk from 600000 to 1000 bytes since the run opened it: stopped; resume from" in last
    assert last.endswith(f"the checkpoint of iteration {done} with --resume, once the data are repaired")
    assert newest_checkpoint(config) == done
    assert left_behind(config) == {}


def test_who_comes_back_to_other_data_does_not_train_on_them(tokens):
    config = config_of(tokens)
    with launched(config, "--prepare", "none", "--chaos", "step 8: kill 1:0", "step 9: restart 1:0") as process:
        wait_for_steps(process, config, 5)
        tokens.rename(tokens.with_name("before.bin"))
        np.zeros(300_000, "<u2").tofile(tokens)
        said = process.stderr.read()
        assert process.wait(timeout=120) == 3, said
    assert "a run resumes with the data and settings that it began with" in said
    assert left_behind(config) == {}


STREAM = """
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Logged:
    path: str

    def stream(self, split):
        with open(self.path, "a") as file:
            file.write(f"{split} {os.getpid()}\\n")
        for number in range(20_000, 0, -1):
            yield f"{number} {split}"
"""


def test_a_stream_is_begun_once_by_every_process(tmp_path, monkeypatch):
    """A stream longer than the run, so that it does not restart by itself."""
    begun = tmp_path / "begun"
    (tmp_path / "own_stream.py").write_text(STREAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = write_config(tmp_path, (2, 1, 1), 120, Experiment__eval_every=20)
    text = f"DataConfig.source = @Logged()\nLogged.path = {str(begun)!r}\n"
    config.write_text(f"import own_stream\n{config.read_text()}{text}")
    chaos = ["--chaos", "step 40: kill 1:0", "step 41: restart 1:0"]
    code, said = tell(config, "--processes", 2, "--run-dir", tmp_path / "run", "--prepare", "none", *chaos)
    assert code == 0, said
    assert "with 2 processes" in said.partition("died")[2]
    lines = begun.read_text().splitlines()
    # The supervisor and three members begin to train; the services look at no data.
    assert sorted(line.split()[0] for line in lines) == ["train"] * 4 + ["validation"] * 3
    assert len(set(lines)) == len(lines)
    np.testing.assert_allclose(losses(tmp_path / "run"), whole(config), rtol=1e-8)
