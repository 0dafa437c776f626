"""A checkpoint that several hosts write together: the files that one host would write, each host its own ranges.

The first host makes the files without values, all hosts fill in what they have, each reads an equal part of the files
back, and the first one writes the manifest. No host has more of the state in memory than its own pieces.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from swift.checkpoint.hosts.host_board import HostBoard, Save
from swift.checkpoint.hosts.shared_files import Contents, Filled, Piece, check_filled, fill_in, stored_shapes
from swift.checkpoint.partial.expert_units import StateSplit
from swift.checkpoint.storage.digests import synced_digest
from swift.checkpoint.storage.directory import ARRAYS, begin_save, temporary_path
from swift.checkpoint.storage.manifest import Ledger, Manifest
from swift.checkpoint.storage.orbax_files import files_of, reserve_arrays
from swift.checkpoint.storage.writer import WrittenArrays, finish_save


@dataclass(frozen=True)
class HostSave:
    """A save, from the side of one of several hosts; its methods are called in order.

    Attributes:
        directory: directory of all checkpoints of a run.
        save: the save, by the name that it has for all hosts.
        own: number of this host.
        num_hosts: number of hosts.
        split: division of the state.
        chosen_LK: classes that are saved.
    """

    directory: Path
    save: Save
    own: int
    num_hosts: int
    split: StateSplit
    chosen_LK: np.ndarray

    @cached_property
    def board(self) -> HostBoard:
        """Notes of the hosts about this save."""
        return HostBoard(self.directory, self.save, self.own)

    def begin(self, write: Callable[[Path, Mapping[str, np.ndarray]], None]) -> None:
        """Makes the files of the checkpoint, on the first host; may be repeated.

        Args:
            write: function that writes small arrays, see ``reserve_arrays``.

        Raises:
            OSError, ValueError: there is no room, or they cannot be made.
        """
        temporary = begin_save(self.directory, self.save.step, self.board.path)
        try:
            reserve_arrays(temporary / ARRAYS, self._shapes, write, self.board.sign)
            self.board.post("begun", {})
        except BaseException:
            self.discard()
            raise

    def wait(self) -> None:
        """Waits on another host until the first one has made the files; raises as ``HostBoard.read`` does."""
        self.board.read(0, "begun")

    def write(self, pieces: Iterable[Piece]) -> None:
        """Writes the pieces of this host, and checks its part of the files once those of all hosts are there.

        Raises:
            OSError, ValueError: they cannot be written, some files are not right, or another host has failed.
            Spoilt: what another host has is of no use.
        """
        filled = fill_in(self._arrays, self.split, self.chosen_LK, pieces, self.board.sign)
        self.board.post("filled", filled.to_json())
        found = check_filled(self._arrays, self.split, self.chosen_LK, self._filled, self.own, self.board.sign)
        self.board.post("checked", found.to_json())

    def commit(
        self, ledger: Ledger, *, identity: Mapping[str, Any], extra: Mapping[str, Any], num_kept: int
    ) -> tuple[Manifest, list[int]]:
        """Writes the manifest on the first host, and gives the checkpoint its name; see ``save_checkpoint``.

        Returns:
            The manifest, and the bytes of values that each host has written.
        """
        contents, bytes_of_hosts = Contents(), [filled.num_bytes for filled in self._filled]
        for host in range(self.num_hosts):
            contents.adopt(self.board.read(host, "checked"))
        written = WrittenArrays(contents.files, self._common(), contents.dense, contents.units)
        step = self.save.step
        options: dict[str, Any] = {"identity": identity, "extra": extra, "num_kept": num_kept}
        return finish_save(self.directory, step, written, self.split, self.chosen_LK, ledger, **options), bytes_of_hosts

    def discard(self) -> None:
        """Removes the files of a save that has failed, on the first host: they would keep a full disk full."""
        shutil.rmtree(temporary_path(self.directory, self.save.step), ignore_errors=True)

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        return stored_shapes(self.split, self.chosen_LK)

    @property
    def _arrays(self) -> Path:
        return temporary_path(self.directory, self.save.step) / ARRAYS

    @cached_property
    def _filled(self) -> list[Filled]:
        """Reports of all hosts on what they have written, once all have."""
        return [Filled.from_json(self.board.read(host, "filled")) for host in range(self.num_hosts)]

    def _common(self) -> dict[str, str]:
        """Digests of the files that belong to no array."""
        root, of_arrays = self._arrays.parent, {self._arrays / files_of(name) for name in self._shapes}
        paths = [path for path in self._arrays.rglob("*") if path.is_file() and path.parent not in of_arrays]
        return {path.relative_to(root).as_posix(): synced_digest(path) for path in sorted(paths)}
