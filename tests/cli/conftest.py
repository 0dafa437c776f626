"""A tiny experiment, a run of it that stopped half way, and a way to run a command and see all that it did."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from swift.cli.main import main
from tests.shared_programs import shared_programs

TINY = """
Experiment.model = @ModelConfig()
ModelConfig.num_layers = 2
ModelConfig.model_dim = 16
ModelConfig.num_heads = 2
ModelConfig.ffn_dim = 32
ModelConfig.sequence_length = 16
Experiment.experts = @ExpertConfig()
ExpertConfig.num_classes = 4
Experiment.topology = @Topology()
Topology.num_expert_ranks = 2
Experiment.optimizer = @OptimizerConfig()
OptimizerConfig.warmup_steps = 2
Experiment.data = @DataConfig()
DataConfig.source = @TextFiles()
DataConfig.validation_share = 0.3
TextFiles.pattern = 'corpus/*.txt'
Experiment.num_steps = 6
Experiment.sequences_per_microbatch = 4
Experiment.eval_every = 0
Experiment.checkpoint = @CheckpointConfig()
CheckpointConfig.every = 2
"""


@dataclass(frozen=True)
class Told:
    """Outcome of a command: its exit code, its output, and the paths that were not there before."""

    code: int
    out: str
    err: str
    new: list[str]


def write_corpus(directory: Path) -> None:
    directory.mkdir()
    for seed in range(10):
        words = random.Random(seed).choices(["alpha", "beta", "gamma", "delta"], k=100)
        (directory / f"{seed}.txt").write_text(" ".join(words))


@pytest.fixture(scope="session")
def compiled():
    """Programs that commands of this process have compiled."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def programs(compiled):
    """Each program is compiled once for the commands that have the same settings."""
    with shared_programs(compiled):
        yield


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A directory with tiny.gin and a corpus, which no test writes to."""
    directory = tmp_path_factory.mktemp("home")
    write_corpus(directory / "corpus")
    (directory / "tiny.gin").write_text(TINY)
    return directory


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    """A working directory with tiny.gin and a corpus, for one test."""
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def half_run(home) -> Path:
    """A run of tiny.gin that was stopped at iteration 4 of 6, with checkpoints of 2 and 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "tiny.gin", "--run-dir", "half", "--stop-at", "4"]) == 0
    return home / "half"


@pytest.fixture
def half(half_run, here) -> Path:
    """A copy of ``half_run`` in the working directory, for one test to damage."""
    (here / "half").unlink(missing_ok=True)
    return shutil.copytree(half_run, here / "half")


def files(directory: Path) -> set[Path]:
    """All that is in a directory, but for what Python keeps of the modules that a command imports."""
    return {path for path in directory.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def tell(here, capfd) -> Callable[..., Told]:
    """Runs a command in the working directory."""

    def run(*arguments: str) -> Told:
        before = files(here)
        capfd.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = error.code
        out, err = capfd.readouterr()
        return Told(code, out, err, sorted(str(path.relative_to(here)) for path in files(here) - before))

    return run


@pytest.fixture
def refusal(tell) -> Callable[..., str]:
    """Runs a command that must be refused: exit code 2, one line, nothing on stdout, nothing written."""

    def run(*arguments: str) -> str:
        told = tell(*arguments)
        assert (told.code, told.out, told.new) == (2, "", []), told
        assert told.err.startswith("swift"), told.err
        assert told.err.count("\n") == 1, told.err
        return told.err.removeprefix("swift: ").rstrip("\n")

    return run
