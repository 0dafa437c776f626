"""The standing of a comparison's runs: which are left to begin or to resume, by what is in their directories."""

from pathlib import Path
from typing import Literal

from swift.checkpoint.manifest import committed_steps
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.errors import SettingError
from swift.runlog.files import EVENTS, lines_from_end, parse_object
from swift.runlog.reading import changed_settings, is_run, read_summary
from swift.train.start import TrainOptions, check_resumable

Standing = Literal["new", "unsaved", "unfinished", "diverged", "ended"]
"""State of a run's directory: without a run; with one that has no checkpoint, can be resumed, would only diverge again,
or is complete."""
_STOPPING = ("Experiment.patience", "Experiment.min_improvement")
_ENDINGS = {"start": False, "resume": False, "finish": False, "stop": False, "interrupt": False, "non_finite": True}
"""Maps the events that begin or end an invocation to whether the same settings would end there again."""


def standing_of(experiment: Experiment, run_dir: Path, *, resume: bool) -> Standing:
    """Determines whether a run of a comparison begins, resumes, or has ended; does not read its metrics.

    Raises:
        SettingError: the run exists, but ``--resume`` is not set or the run has other settings.
    """
    if run_dir.exists() and not resume:
        allowed = f"holds {run_dir.name} already; add --resume to continue it, or choose another directory"
        raise SettingError("--run-dir", str(run_dir.parent), allowed)
    if not is_run(run_dir):  # no directory, or only leftovers of an interrupted start, such as a lease
        return "new"
    check_resumable(experiment, TrainOptions(run_dir, config_text(experiment)))
    summary = read_summary(run_dir)
    if summary is not None and summary.get("num_steps") == experiment.num_steps:
        changed = changed_settings(run_dir, config_text(experiment)) if "stopped_early" in summary else ()
        return "unfinished" if any(name in changed for name in _STOPPING) else "ended"
    if _has_diverged(run_dir) and not changed_settings(run_dir, config_text(experiment)):
        return "diverged"
    return "unfinished" if committed_steps(run_dir / "checkpoints") else "unsaved"


def _has_diverged(run_dir: Path) -> bool:
    """Returns whether the last invocation of a run ended because its loss was not finite."""
    path = run_dir / EVENTS
    events = ((parse_object(line) or {}).get("event") for _, line in (lines_from_end(path) if path.exists() else ()))
    return next((_ENDINGS[event] for event in events if event in _ENDINGS), False)
