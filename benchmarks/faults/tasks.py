"""A limit on the threads and processes of one run: a control group of its own."""

import tempfile
from contextlib import suppress
from pathlib import Path

_MOUNTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
"""Places where tasks are counted: version 1 of control groups, and version 2."""


def can_limit_tasks() -> bool:
    """Whether control groups that limit tasks can be made here."""
    limit = TaskLimit()
    try:
        limit.make()
    except OSError:
        return False
    finally:
        limit.remove()
    return True


class TaskLimit:
    """A control group, whose processes together can have a limited number of threads."""

    def __init__(self) -> None:
        self._group: Path | None = None

    def make(self) -> None:
        """Makes the group, which has no limit yet.

        Raises:
            OSError: that is not possible here.
        """
        top = next((one for one in _MOUNTS if (one / "cgroup.procs").exists()), None)
        if top is None:
            raise FileNotFoundError("no control groups are mounted")
        with suppress(OSError):  # version 1 has no such file
            (top / "cgroup.subtree_control").write_text("+pids")
        self._group = Path(tempfile.mkdtemp(prefix="faults-", dir=top))
        self._limit("max")

    def join(self) -> None:
        """Makes the calling process, and all that it will start, a part of the group."""
        self._file("cgroup.procs").write_text("0")

    def leave(self, number: int) -> None:
        """Lets the group start so many more threads."""
        self._limit(str(int(self._file("pids.current").read_text()) + number))

    def lift(self) -> None:
        """Lets the group start any number of threads."""
        self._limit("max")

    def remove(self) -> None:
        """Removes the group, once its processes have ended."""
        if self._group is not None:
            with suppress(OSError):
                self._group.rmdir()

    def _limit(self, number: str) -> None:
        path = self._file("pids.max")
        if not path.exists():
            raise FileNotFoundError(f"{path}: tasks are not counted here")
        path.write_text(number)

    def _file(self, name: str) -> Path:
        assert self._group is not None
        return self._group / name
