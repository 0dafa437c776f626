"""Checks of a run before it starts, and the data that it reads."""

import sys
from collections.abc import Callable
from typing import Any

from swift.data.index_cache import find_index
from swift.data.loader import Loader
from swift.errors import renamed_settings
from swift.runlog.reading import check_new_run
from swift.train.emulated.cluster import EmulatedCluster
from swift.train.fitting import check_shapes
from swift.train.hosts.limits import check_hosts
from swift.train.options import TrainOptions
from swift.train.settings.experiment import Experiment
from swift.train.start import next_length, try_placement


def check_before(experiment: Experiment, options: TrainOptions) -> Any:
    """Checks all of a run but its checkpoints, as it does itself when it starts; nothing is written.

    Returns:
        Identity of the data, as JSON, which has to be the same on all hosts of a run.

    Raises:
        SettingError: a setting, the data or the run directory is not usable, there is no plan for some failures, or too
            little memory.
    """
    if not options.resume:
        check_new_run(options.run_dir)
    if options.hosts.count > 1:
        check_hosts(experiment, 0)
    try_placement(experiment)
    loader, _ = load_data(experiment, options, lambda line: print(line, file=sys.stderr, flush=True))
    listed, length = experiment.failure_list, next_length(experiment, options, 0, experiment.num_steps)
    with renamed_settings({"planner": "Experiment.planner"}):
        cluster = EmulatedCluster(experiment, "none", listed, 1, length)
        cluster.check(listed)
    check_shapes(experiment, cluster.engine, length)
    return loader.state()["data"]


def load_data(experiment: Experiment, options: TrainOptions, report: Callable[[str], None]) -> tuple[Loader, Loader]:
    """Makes the loaders of training and validation.

    Args:
        experiment: settings of the run.
        options: options of this invocation.
        report: function that shows a line about what takes long.
    """
    corpus = None
    if options.corpora is not None:
        corpus = find_index(experiment.data, options.corpora, report, connect=options.connect)
    return experiment.loader("train", corpus), experiment.loader("validation", corpus)
