"""Refusals of settings that work on one host only so far, before anything has started."""

from swift.errors import SettingError
from swift.mesh import LiveMesh
from swift.train.settings import FAILURES_SETTING, Experiment

_ONE_HOST = "works on one host only so far"


def check_hosts(experiment: Experiment, done: int) -> None:
    """Raises SettingError for what several hosts cannot run.

    Args:
        experiment: settings of the run.
        done: iterations done.
    """
    if experiment.ranks == "virtual":
        raise SettingError("Experiment.ranks", "virtual", "are ranks of one device; several hosts need one for each")
    if not experiment.failure_list.is_over(done + 1):
        allowed = f"a worker that fails or rejoins after iteration {done + 1} {_ONE_HOST}"
        raise SettingError(FAILURES_SETTING, list(experiment.failures), allowed)
    if experiment.adapt != "reroute":
        raise SettingError("Experiment.adapt", experiment.adapt, _ONE_HOST)
    if not experiment.chunks.are_stages:
        allowed = f"makes stages of several runs of layers, or of other layers in other pipelines: that {_ONE_HOST}"
        raise SettingError("Experiment.cut", experiment.cut, allowed)
    if experiment.checkpoint.snapshot_every:
        raise SettingError("CheckpointConfig.snapshot_every", experiment.checkpoint.snapshot_every, _ONE_HOST)


def check_all_compute(live: LiveMesh, num_hosts: int) -> None:
    """Raises SettingError if all workers of a host are down: it would have no part in any program."""
    idle = set(range(num_hosts)) - {device.process_index for device in live.mesh.devices.flat}
    if idle:
        failed = [f"{d}:{p}" for d, p in sorted(live.failed)]
        allowed = f"leaves host {min(idle)} without a live worker; start the run on fewer hosts"
        raise SettingError(FAILURES_SETTING, failed, allowed)
