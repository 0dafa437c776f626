"""Refusals of settings that work on one host only so far, before anything has started."""

from swift.errors import SettingError
from swift.train.settings.experiment import Experiment
from swift.train.settings.failure_list import FAILURES_SETTING

_ONE_HOST = "works on one host only so far"


def check_hosts(experiment: Experiment, done: int) -> None:
    """Raises SettingError for what several hosts cannot run.

    Args:
        experiment: settings of the run.
        done: iterations done.
    """
    if experiment.ranks == "virtual":
        raise SettingError("Experiment.ranks", "virtual", "are ranks of one device; several hosts need one for each")
    if any(event.rank is not None and event.step > done + 1 for event in experiment.failure_list.events):
        allowed = f"an expert rank that fails or rejoins by itself after iteration {done + 1} {_ONE_HOST}"
        raise SettingError(FAILURES_SETTING, list(experiment.failures), allowed)
    if experiment.adapt != "reroute":
        raise SettingError("Experiment.adapt", experiment.adapt, _ONE_HOST)
    if experiment.checkpoint.snapshot_every:
        raise SettingError("CheckpointConfig.snapshot_every", experiment.checkpoint.snapshot_every, _ONE_HOST)


def check_all_compute(experiment: Experiment, done: int, num_hosts: int) -> None:
    """Raises SettingError if all workers of a host are down at some time: it would have no part in any program.

    Args:
        experiment: settings of the run.
        done: iterations done.
        num_hosts: number of hosts.
    """
    if num_hosts == 1:
        return
    live, listed = experiment.live_mesh(), experiment.failure_list
    for step in sorted({done + 1, *(event.step for event in listed.events if event.step > done)}):
        failed = listed.failed(step, step + experiment.window - 1)
        homes = zip(live.workers, live.mesh.devices, strict=True)
        busy = {device.process_index for worker, devices in homes if worker not in failed for device in devices}
        idle = set(range(num_hosts)) - busy
        if idle:
            names = [f"{d}:{p}" for d, p in sorted(failed)]
            allowed = f"leaves host {min(idle)} without a live worker at iteration {step}; start the run on fewer hosts"
            raise SettingError(FAILURES_SETTING, names, allowed)
