"""The files of a checkpoint, checked by all hosts together, each an equal part."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from swift.checkpoint.storage.directory import checkpoint_path, committed_steps
from swift.checkpoint.storage.manifest import read_manifest
from swift.checkpoint.storage.verification import Checker
from swift.errors import SettingError
from swift.train.hosts.agreement import Hosts


def checked_by_all(directory: Path, hosts: Hosts) -> Checker:
    """Has each of several hosts check some files of the newest checkpoint, and tell the others.

    Args:
        directory: directory of all checkpoints of a run, at least one.
        hosts: hosts of the run.

    Returns:
        A checker that knows what all have found; of one host alone, one that has looked at nothing yet.
    """
    checker, found = Checker(directory), list[Any]()
    if hosts.count > 1:
        path = checkpoint_path(directory, hosts.of_first(committed_steps(directory)[-1:])[0])
        with suppress(SettingError):  # a checkpoint without a sound manifest is passed over
            found = checker.check_equal_part(read_manifest(path, "checkpoint"), hosts.own, hosts.count)
        for of_host in hosts.gather(found):
            checker.adopt(of_host)
    return checker
