"""The standing of a comparison's runs: which are left to begin or to resume, by what is in their directories."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from swift.checkpoint.manifest import checkpoint_path, checkpoint_steps, committed_steps, read_manifest
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.errors import SettingError
from swift.runlog.files import EVENTS, is_plan, lines_from_end, parse_object
from swift.runlog.reading import changed_settings, is_run, read_summary
from swift.train.start import TrainOptions, check_resumable, stopped_early

Standing = Literal["new", "unsaved", "unfinished", "diverged", "ended"]
"""State of a run's directory: without a run; with one that has no checkpoint, can be resumed, would only diverge again,
or is complete."""
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
    if summary is not None and _has_ended(summary, experiment, run_dir):
        return "ended"
    if _has_diverged(run_dir) and not changed_settings(run_dir, config_text(experiment)):
        return "diverged"
    return "unfinished" if committed_steps(run_dir / "checkpoints") else "unsaved"


def _has_ended(summary: Mapping[str, Any], experiment: Experiment, run_dir: Path) -> bool:
    """Returns whether a run with a summary has ended, if its length or what stops it early may have changed since."""
    steps = checkpoint_steps(run_dir / "checkpoints")
    if "stopped_early" in summary and steps:
        with suppress(SettingError):  # damaged: the summary says what is known
            newest = read_manifest(checkpoint_path(run_dir / "checkpoints", steps[-1]), "--resume")
            return stopped_early(experiment, newest) is not None
    return bool(summary.get("num_steps") == experiment.num_steps)


def _has_diverged(run_dir: Path) -> bool:
    """Returns whether the last invocation of a run ended because its loss was not finite."""
    path = run_dir / EVENTS
    lines = (line for _, line in (lines_from_end(path) if path.exists() else ()) if not is_plan(line))
    events = ((parse_object(line) or {}).get("event") for line in lines)
    return next((_ENDINGS[event] for event in events if event in _ENDINGS), False)
