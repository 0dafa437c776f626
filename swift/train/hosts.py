"""Runs on several hosts: joins the hosts, exchanges values, and divides reading and checking among them.

``join_hosts`` joins the hosts through JAX's coordination service. Between iterations, ``Hosts`` exchanges values, so
that all hosts act on the findings of one. The values are exchanged through the devices of all hosts, so every host has
to make the same calls in the same order. If a host dies, the others wait for it until JAX's heartbeat timeout
terminates them, see ``swift.cli.processes``.

Each host reads its own part of every batch, and verifies an equal part of a checkpoint's files. Settings that are only
supported on a single host so far are refused before anything starts.
"""

import ipaddress
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from swift.checkpoint.arrays import Verifier
from swift.checkpoint.manifest import checkpoint_path, committed_steps, read_manifest
from swift.config.experiment import FAILURES_SETTING, Experiment
from swift.config.failures import failure_list
from swift.data.loader import Loader, SourceBatches
from swift.data.windows import Batch
from swift.errors import JOINING_NOTE, RunError, SettingError, first_line
from swift.mesh.process_group import bound_address, find_group, own_address, use_gloo_at
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.topology import Topology, worker_names
from swift.train.build import make_mesh

_SEEN_S = 30.0
"""Seconds within which all hosts must see a new file in a shared directory."""
_JOINING_S, _SILENCE_S = 60, 20
"""Seconds within which all hosts must join, and seconds without a heartbeat after which a host counts as dead."""
_ONE_HOST = "works on one host only so far"


@dataclass(frozen=True)
class Hosts:
    """Communication among the hosts of a run; with a single host, nothing is communicated.

    Attributes:
        count: number of hosts.
        index: number of this host, from 0; host 0 keeps the run's record.
    """

    count: int = 1
    index: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is host 0, which keeps the run's record."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """Gathers a JSON-serializable value from every host; returns the list of values by host, on all hosts."""
        if self.count == 1:
            return [value]
        # A collective needs arrays of the same shape on all hosts: exchange the sizes first, then pad.
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(text.size)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: text.size] = text
        texts = multihost_utils.process_allgather(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes.tolist(), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Broadcasts a JSON-serializable value from host 0 and returns it on every host."""
        return self.gather(value)[0]

    def any(self, value: bool) -> bool:
        """Returns whether the value is true on any host."""
        return value if self.count == 1 else bool(multihost_utils.process_allgather(np.bool_(value)).any())

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Makes a block of local work succeed on all hosts or fail on all hosts.

        Raises:
            SettingError, RunError: this host's own error, or another host's error with that host's number.
        """
        error: SettingError | RunError | None = None
        try:
            yield
        except (SettingError, RunError) as raised:
            if self.count == 1:
                raise
            error = raised
        if self.count == 1:
            return
        errors_by_host = self.gather(None if error is None else _fields(error))
        if any(errors_by_host):  # all hosts see the same errors, so all of them separate
            self.separate()
            raise error or _error(*next((host, fields) for host, fields in enumerate(errors_by_host) if fields))

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raises SettingError on all hosts unless all pass the same facts, which are JSON values by name."""
        everyone = self.gather(dict(facts))
        for host, theirs in enumerate(everyone):
            for name in sorted(everyone[0].keys() | theirs.keys()):
                value = everyone[0].get(name)
                if theirs.get(name) != value:
                    self.separate()
                    allowed = f"host 0 has {value!r}: all hosts of a run need the same"
                    raise SettingError(f"host {host}: {name}", theirs.get(name), allowed)

    def check_shared(self, directory: Path) -> None:
        """Raises SettingError on all hosts unless all share host 0's directory, such as on a network file system."""
        if self.count == 1:
            return
        (name, *_) = self.gather(f".seen-by-hosts-{secrets.token_hex(8)}")
        mark, until = directory / name, time.monotonic() + _SEEN_S
        try:
            with self.all_or_none():
                if self.is_first:
                    _touch(mark)
            with self.all_or_none():
                while not mark.exists():  # a network file system may show new files late
                    if time.monotonic() > until:
                        allowed = "is not the directory that host 0 has: all hosts must share one directory"
                        raise SettingError("--run-dir", str(directory), allowed)
                    time.sleep(0.1)
        finally:
            if self.is_first:
                mark.unlink(missing_ok=True)

    def separate(self) -> None:
        """Shuts down the group of hosts; all hosts call this together, and each may then exit at any time."""
        if self.count > 1:
            self.gather(None)  # wait first: another host may need longer than JAX's shutdown waits
            jax.distributed.shutdown()


SINGLE_HOST = Hosts()
"""The hosts of a run on one host."""


def _fields(error: SettingError | RunError) -> list[str]:
    if isinstance(error, SettingError):
        return ["setting", error.setting, str(error.value), error.allowed]
    return ["run", str(error)]


def _error(host: int, fields: list[str]) -> SettingError | RunError:
    kind, *words = fields
    if kind == "run":
        return RunError(f"host {host}: {words[0]}")
    return SettingError(f"host {host}: {words[0]}", *words[1:])


def _touch(path: Path) -> None:
    """Creates an empty file in the run directory."""
    try:
        path.touch()
    except OSError as error:
        raise SettingError("--run-dir", str(path.parent), f"cannot be written to: {error.strerror}") from error


@dataclass(frozen=True)
class HostSettings:
    """The settings with which this process joins the hosts of a run.

    Attributes:
        coordinator: address HOST:PORT on which host 0 listens; None if JAX should detect the cluster (Slurm, Open MPI,
            TPU virtual machines, Kubernetes).
        count: number of hosts; None to detect it from the cluster.
        index: number of this host, from 0; None to detect it from the cluster.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None


def own_devices(topology: Topology, place: HostSettings) -> int:
    """Returns the number of devices that each host emulates.

    Raises:
        SettingError: the devices cannot be divided evenly among the hosts, or the number of hosts is unknown.
    """
    if place.count is None:
        raise SettingError("--num-hosts", None, "has to be given where devices are emulated, each host's share of them")
    if topology.num_devices % place.count:
        allowed = f"must divide the {topology.num_devices} devices of the topology, of which each host emulates a share"
        raise SettingError("--num-hosts", place.count, allowed)
    return topology.num_devices // place.count


def join_hosts(place: HostSettings) -> Hosts:
    """Joins the other hosts; ``jax.devices()`` then lists the devices of all hosts. Call it before initializing JAX.

    Host 0 listens only on the coordinator's address, and gloo on the address from which this host reaches the
    coordinator. If joining fails, or a host dies later, JAX aborts the process and prints its own long report.

    Raises:
        SettingError: the other hosts cannot be detected from the cluster, or this host cannot use the coordinator's
            address.
    """
    # This service is on by default and catches SIGTERM, which would have no effect until ``Interrupt`` is active.
    jax.config.update("jax_enable_preemption_service", False)
    place, devices = (place, None) if place.coordinator else _place_by_surroundings(place)
    address = place.coordinator
    assert address is not None
    try:
        listening = bound_address(address) if place.index == 0 else None
        use_gloo_at(own_address(address))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError("--coordinator", address, f"host {place.index} cannot use it: {reason}") from error
    _tell_of_loopback(address, own_address(address))
    try:
        jax.distributed.initialize(
            address,
            place.count,
            place.index,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=listening,  # the default is all of the machine's addresses
            initialization_timeout=_JOINING_S,
            heartbeat_timeout_seconds=_SILENCE_S,
        )
    except (RuntimeError, ValueError) as error:
        allowed = f"host {place.index} cannot use it: {first_line(error)}"
        raise SettingError("--coordinator", address, allowed) from error
    return Hosts(jax.process_count(), jax.process_index())


def _place_by_surroundings(place: HostSettings) -> tuple[HostSettings, list[int] | None]:
    """Detects from the cluster how to join, and which devices this process takes; None for all visible devices."""
    try:
        address, count, index, devices = find_group(place.count, place.index, _JOINING_S)
        lacking = [
            name
            for name, value in (("an address", address), ("--num-hosts", count), ("--host", index))
            if value is None
        ]
        if lacking:
            raise ValueError(f"nothing says {' and '.join(lacking)}")
    except (RuntimeError, ValueError) as error:
        allowed = f"JAX does not find the other hosts in these surroundings ({first_line(error)}): give HOST:PORT"
        raise SettingError("--coordinator", "auto", allowed) from error
    return replace(place, coordinator=address, count=count, index=index), devices if shares_machine(
        os.environ
    ) else None


def shares_machine(environment: Mapping[str, str]) -> bool:
    """Whether Slurm or Open MPI started several tasks on this machine that must each take one of its devices.

    By default, JAX assigns one device to every such task, even if the task is alone on its machine. If the scheduler
    exposes fewer devices to a task than there are tasks, they belong to that task, which then takes all of them.
    """
    # For example, "2(x3),1" means two tasks on each of three nodes and one on a fourth.
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    if "SLURM_PROCID" in environment:
        tasks, nodes = (environment.get(name, "") for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_NODES"))
        most = max((int(words.partition("(")[0]) for words in per_node.split(",") if words), default=0)
        most = most or -(-int(tasks or 1) // int(nodes or 1))
    else:
        most = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    visible = environment.get("CUDA_VISIBLE_DEVICES") or environment.get("ROCR_VISIBLE_DEVICES")
    return most > 1 and (visible is None or len(visible.split(",")) >= most)


def _tell_of_loopback(coordinator: str, local_address: str) -> None:
    """Prints a note to stderr if the coordinator's name resolves to a loopback address; shown if joining fails."""
    host = coordinator.rpartition(":")[0]
    if ipaddress.ip_address(local_address).is_loopback and not host.startswith(("127.", "[::1]", "localhost")):
        print(f"{JOINING_NOTE}{host} is a loopback address on this machine, which others do not reach", file=sys.stderr)


def check_hosts(experiment: Experiment, done: int) -> None:
    """Raises SettingError for settings that are only supported on a single host so far.

    Args:
        experiment: settings of the run.
        done: iterations done.
    """
    if experiment.ranks == "virtual":
        raise SettingError("Experiment.ranks", "virtual", "are ranks of one device; several hosts need one for each")
    if any(event.rank is not None and event.step > done + 1 for event in failure_list(experiment).events):
        allowed = f"an expert rank that fails or rejoins by itself after iteration {done + 1} {_ONE_HOST}"
        raise SettingError(FAILURES_SETTING, list(experiment.failures), allowed)
    if experiment.adapt != "reroute":
        raise SettingError("Experiment.adapt", experiment.adapt, _ONE_HOST)
    if experiment.checkpoint.snapshot_every:
        raise SettingError("CheckpointConfig.snapshot_every", experiment.checkpoint.snapshot_every, _ONE_HOST)


def check_all_compute(experiment: Experiment, done: int, num_hosts: int) -> None:
    """Raises SettingError if all workers of a host are down at some iteration, so that it would not run any program.

    Args:
        experiment: settings of the run.
        done: iterations done.
        num_hosts: number of hosts.
    """
    if num_hosts == 1:
        return
    live, listed = make_mesh(experiment), failure_list(experiment)
    for step in sorted({done + 1, *(event.step for event in listed.events if event.step > done)}):
        failed = listed.failed(step, step + experiment.window - 1)
        worker_devices = zip(live.workers, live.mesh.devices, strict=True)
        busy = {
            device.process_index for worker, devices in worker_devices if worker not in failed for device in devices
        }
        idle = set(range(num_hosts)) - busy
        if idle:
            names = worker_names(failed)
            allowed = f"leaves host {min(idle)} without a live worker at iteration {step}; start the run on fewer hosts"
            raise SettingError(FAILURES_SETTING, names, allowed)


def checked_by_all(directory: Path, hosts: Hosts) -> Verifier:
    """Verifies the newest checkpoint on all hosts together; each host checks an equal part of the files.

    Args:
        directory: directory of all checkpoints of a run; it has at least one.
        hosts: hosts of the run.

    Returns:
        A verifier with the findings of all hosts. On a single host it has no findings yet, and checks files when they
        are needed.
    """
    checker, findings = Verifier(directory), list[Any]()
    if hosts.count > 1:
        path = checkpoint_path(directory, hosts.broadcast(committed_steps(directory)[-1:])[0])
        with suppress(SettingError):  # if the manifest is damaged, the restore skips this checkpoint
            findings = checker.check_equal_part(read_manifest(path, "checkpoint"), hosts.index, hosts.count)
        for host_findings in hosts.gather(findings):
            checker.adopt(host_findings)
    return checker


@dataclass(frozen=True)
class LocalSequences:
    """Batches in which only the sequences of this host's devices are read; the other sequences are padding.

    Attributes:
        loader: batches of a split.
        steps: function that returns the current step functions, which know this host's sequences.
    """

    loader: Loader
    steps: Callable[[], Steps]

    def batch(self, step: int) -> Batch:
        """Loads this host's part of an iteration's batch, see ``Loader.batch``."""
        return self.loader.batch(step, self.steps().read_here)

    @property
    def parts(self) -> Sequence[SourceBatches]:
        """Batches of each source, see ``Loader.parts``."""
        return self.loader.parts

    def num_bytes(self, step: int) -> int | None:
        """Counts the bytes of text in a whole batch, see ``Loader.num_bytes``."""
        return self.loader.num_bytes(step)
