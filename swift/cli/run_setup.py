"""Reads the options that ``train``, ``compare`` and ``launch`` share: directories, observers and initial weights."""

import argparse
from datetime import datetime
from pathlib import Path

from swift.config.experiment import Experiment
from swift.config.gin_reader import load_stored
from swift.config.stored import OF_RUN, OF_TRAINING
from swift.errors import SettingError
from swift.runlog.observers import Observer
from swift.runlog.reading import Run, read_run
from swift.runlog.trackers import TRACKERS
from swift.train.initial_weights import ModelSource, WeightSource
from swift.train.model_directory import is_model
from swift.typed import SourceText
from swift.variables import cache_directory


def weights_of(options: argparse.Namespace, experiment: Experiment) -> WeightSource | None:
    """Returns the source of a new run's initial weights, given by ``--init-from``, or None without that option.

    Args:
        options: options of the command.
        experiment: settings of the new run, which may provide the user's own classes that the other run needs.
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
    """Creates the observers that ``--logger`` names."""
    return tuple(TRACKERS[name]() for name in options.logger)


def reference_of(options: argparse.Namespace) -> Run | None:
    """Reads the run of ``--compare-loss-to``; returns None without that option."""
    path = options.compare_loss_to
    return None if path is None else read_run(path, setting="--compare-loss-to")


def corpora_directory() -> Path | None:
    """Returns the directory for corpus indexes that all runs share, or None for a user without a home directory."""
    cache = cache_directory()
    return None if cache is None else cache / "corpora"


def run_dir_of(options: argparse.Namespace) -> Path:
    """Returns the directory for a run; raises SettingError for ``--resume`` without ``--run-dir``."""
    if options.resume and options.run_dir is None:
        raise SettingError("--run-dir", SourceText("(not set)"), "--resume needs the directory of the run to continue")
    return options.run_dir or new_run_dir(options.config.stem)


def new_run_dir(name: str) -> Path:
    """Returns the default directory for a new run: ``runs/NAME-DATE-TIME``."""
    return Path("runs") / f"{name[:100]}-{datetime.now():%Y%m%d-%H%M%S}"
