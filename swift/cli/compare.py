"""``swift compare``: runs experiments, each in its own directory, and writes a joint report.

The runs follow one another in this process, see ``run_series``; or each has its own process, see ``run_processes``.
"""

import argparse

from swift.cli.run_setup import new_run_dir
from swift.config.gin_reader import all_installed
from swift.config.sweep import compared_runs
from swift.errors import RunError, SettingError
from swift.typed import SourceText

_MOST_NAMES = 5


def compare(options: argparse.Namespace) -> None:
    """Runs ``swift compare CONFIG.gin ...``.

    Raises:
        SettingError: an option or a setting cannot work; nothing was written.
        RunError: runs with processes of their own have failed; the others have ended and are shown.
    """
    for name, is_given in (("resume", options.resume), ("task", options.task is not None)):
        if is_given and options.run_dir is None:
            raise SettingError("--run-dir", SourceText("(not set)"), f"--{name} needs the directory of the comparison")
    runs = compared_runs(all_installed(options.configs), options.set, options.vary, options.seeds)
    top = options.run_dir or new_run_dir(options.configs[0].stem)
    if options.task is not None:
        from swift.cli.compared_run import run_task

        run_task(runs, top, options)
        return
    if options.resume and not any((top / run.name).exists() for run in runs):
        names = ", ".join([run.name for run in runs[:_MOST_NAMES]] + ["..."] * (len(runs) > _MOST_NAMES))
        allowed = f"holds no run of this comparison ({names}); leave out --resume to begin it there"
        raise SettingError("--run-dir", str(top), allowed)
    failures = dict[str, str]()
    experiments = {top / run.name: run.experiment for run in runs}
    if options.vary or options.seeds is not None or options.jobs is not None:
        from swift.cli.run_processes import run_processes

        failures = run_processes(runs, top, options)
    else:
        from swift.cli.run_series import run_series

        if not run_series(experiments, options):
            return
    from swift.cli.comparison import show_comparison

    failures = show_comparison(experiments, top, options.format, failures)
    if failures:
        name, reason = next(iter(failures.items()))
        raise RunError(f"{len(failures)} of {len(runs)} runs have failed: {name}: {reason}")
