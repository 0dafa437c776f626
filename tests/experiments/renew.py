"""Writes the expanded form of every experiment again: ``python tests/experiments/renew.py``, then read the diff."""

from pathlib import Path

from swift.config.gin_reader import load_experiment
from swift.config.stored import config_text

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
EXPANDED = Path(__file__).parent / "expanded"


def experiments() -> list[str]:
    """The gin files under ``experiments/``, by their paths there."""
    return sorted(path.relative_to(EXPERIMENTS).as_posix() for path in EXPERIMENTS.rglob("*.gin"))


def expanded_path(name: str) -> Path:
    """Path of the expanded form of an experiment."""
    return EXPANDED / Path(name).with_suffix(".txt")


def renew() -> None:
    """Writes every expanded form, and removes those of experiments that are gone."""
    paths = {expanded_path(name): name for name in experiments()}
    for old in set(EXPANDED.rglob("*.txt")) - set(paths):
        old.unlink()
    for path, name in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config_text(load_experiment(EXPERIMENTS / name)))


if __name__ == "__main__":
    renew()
