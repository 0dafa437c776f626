"""The options that ``train``, ``compare`` and ``launch`` share: directories, observers, and weights to begin with."""

import argparse
from datetime import datetime
from pathlib import Path

from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.config.stored import OF_RUN, OF_TRAINING
from swift.errors import SettingError
from swift.runlog.observers import Observer
from swift.runlog.trackers import TRACKERS
from swift.train.initial_weights import ModelSource, WeightSource
from swift.train.model_directory import is_model
from swift.typed import SourceText
from swift.variables import cache_directory


def weights_of(options: argparse.Namespace, experiment: Experiment) -> WeightSource | None:
    """Finds the run or the model whose weights a new run begins with, by ``--init-from``; None: it is not given.

    Args:
        options: options of the command.
        experiment: settings of the new run, which may have classes of the user's own that the other has, too.
    """
    if options.init_from is None:
        if options.init_config is not None:
            raise SettingError("--init-config", str(options.init_config), "goes with --init-from, which is not set")
        return None
    kind, spared = (ModelSource, OF_TRAINING) if is_model(options.init_from) else (WeightSource, OF_RUN)
    theirs = load_stored(
        options.init_from,
        "--init-from",
        options.init_config,
        optional_settings=spared,
        option="--init-config",
        beside=experiment,
    )
    return kind(options.init_from, theirs)


def observers_of(options: argparse.Namespace) -> tuple[Observer, ...]:
    """Makes the observers that a command line names."""
    return tuple(TRACKERS[name]() for name in options.logger)


def corpora_directory() -> Path | None:
    """Directory of indexes of corpora, which outlive their run, see ``find_index``; None: the user has no home."""
    cache = cache_directory()
    return None if cache is None else cache / "corpora"


def run_dir_of(options: argparse.Namespace) -> Path:
    """Directory of a run; raises SettingError if it is to resume and no directory was given."""
    if options.resume and options.run_dir is None:
        raise SettingError("--run-dir", SourceText("(not set)"), "--resume needs the directory of the run to continue")
    return options.run_dir or new_run_dir(options.config.stem)


def new_run_dir(name: str) -> Path:
    """Default directory of a run."""
    return Path("runs") / f"{name[:100]}-{datetime.now():%Y%m%d-%H%M%S}"
