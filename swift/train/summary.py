"""The summary of a run."""

from typing import Any

import jax

from swift.errors import RunError, SettingError
from swift.runlog.analysis.measures import measure
from swift.runlog.metrics import ranges_text
from swift.runlog.reading import read_run
from swift.runlog.run_directory import RunDirectory
from swift.train.settings.experiment import Experiment


def summarize(experiment: Experiment, directory: RunDirectory, device: str, **more: Any) -> dict[str, Any]:
    """Computes the summary of a run, and writes it if the run has reached its end.

    It is computed from the record, so that a resumed run and an unbroken one have the same.

    Args:
        experiment: settings of the run.
        directory: run directory.
        device: kind of its devices.
        **more: further fields; JSON.

    Raises:
        RunError: the record is damaged, which a run that goes on does not read. All else is done.
    """
    try:
        run = read_run(directory.path)
    except SettingError as error:
        why = f"the iterations are done and saved, but their record cannot be summed up: {error}"
        raise RunError(f"{why}; without the damage, swift report shows the run") from error
    facts = {
        "name": directory.path.name,
        "placement": experiment.placement.name,
        "layout": experiment.optimizer.layout,
        "ranks": experiment.ranks,
        "pipelines": experiment.topology.num_pipelines,
        "stages": experiment.topology.num_stages,
        "device": device,
        "jax_version": jax.__version__,
        "num_steps": experiment.num_steps,
        "target_loss": experiment.target_loss,
    }
    summary = facts | measure(run, experiment.target_loss) | more
    if missing := run.metrics.missing:
        summary["steps_without_record"] = ranges_text(missing)
    if run.metrics.last_step == experiment.num_steps:
        directory.write_summary(summary)
    return summary
