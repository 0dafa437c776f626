"""What the processes of a run share, and nobody needs after it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swift.files import replace_file

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Scratch:
    """Two directories: one that all processes see, and one in the memory of each node.

    Attributes:
        path: for the configuration and programs.
        node: whose memory it is.
    """

    path: Path
    node: int = 0

    @classmethod
    @contextmanager
    def of(cls, config: str, shared: Path | None = None) -> Iterator[Self]:
        """New ones for a configuration, gone with the block.

        Args:
            config: gin.
            shared: a directory that all nodes see, where there are several.
        """
        for earlier in () if shared is None else shared.glob("swift-*"):
            shutil.rmtree(earlier, ignore_errors=True)  # of a first node that was lost with all its processes
        prefix = f"swift-{os.getpid()}-"  # should something be left after all, one knows whose it was
        scratch = cls(Path(tempfile.mkdtemp(prefix=prefix, dir=shared)).absolute())
        try:
            replace_file(scratch.config, config.encode())
            scratch.programs.mkdir()
            with scratch.on_this_node():
                if shared is None:
                    (scratch.memory / "snapshots").mkdir()
                    scratch.snapshots.symlink_to(scratch.memory / "snapshots")
                else:  # the keeper, which is on the first node, has to see those of all
                    scratch.snapshots.mkdir()
                yield scratch
        finally:
            scratch.remove()

    @contextmanager
    def on_this_node(self) -> Iterator[None]:
        """With the memory of this node, which is gone with the block."""
        self.memory.mkdir(mode=0o700, exist_ok=True)
        try:
            self.states.mkdir(exist_ok=True)
            yield
        finally:
            shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def memory(self) -> Path:
        """For states, in shared memory where the machine has that."""
        top = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        return top / f"{self.path.name}-node-{self.node}"

    @property
    def config(self) -> Path:
        """The operative configuration, gin."""
        return self.path / "config.gin"

    @property
    def programs(self) -> Path:
        """The directory of compiled programs, see ``ProgramStore``."""
        return self.path / "programs"

    @property
    def states(self) -> Path:
        """The directory of whole states, between two epochs, see ``Keep``."""
        return self.memory / "states"

    @property
    def snapshots(self) -> Path:
        """The directory of states without slots, that are to be saved or were restored."""
        return self.path / "snapshots"

    def remove(self) -> None:
        """Removes what goes with a node; any process of it may, whose supervisor is gone."""
        shutil.rmtree(self.memory, ignore_errors=True)
        if self.node == 0:
            shutil.rmtree(self.path, ignore_errors=True)
