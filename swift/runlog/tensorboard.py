"""TensorBoard files of a run. Only viewers read them, so trouble with them never delays or ends the run."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

from swift.runlog.observer import Observer, grouped_scalars

_SCHEME = "swift-file"
_FLUSH_S = 10


def open_board(path: Path, last_step: int) -> Any:
    """Opens a writer of scalars.

    Args:
        path: directory of the files; made if it is missing.
        last_step: last iteration to keep; TensorBoard ignores what was written earlier about later ones.
    """
    path.mkdir(exist_ok=True)
    return SummaryWriter(f"{_SCHEME}:{path}", purge_step=last_step + 1, flush_secs=_FLUSH_S)


class TensorBoard(Observer):
    """Writes the numbers of every iteration for TensorBoard, in groups such as ``train`` and ``experts``."""

    def begin(self, run_dir: Path, step: int, config: str) -> None:
        """See Observer."""
        del config
        self._board = open_board(run_dir / "tensorboard", step)

    def on_step(self, record: Mapping[str, Any]) -> None:
        """See Observer."""
        for tag, value in grouped_scalars(record).items():
            self._board.add_scalar(tag, value, record["step"])

    def end(self) -> None:
        """See Observer."""
        self._board.close()


class _LenientFile:
    """A file that drops everything after its first error.

    tensorboardX writes in a thread of its own, which an error would end; logging would then block forever, since the
    thread's queue has room for only ten values.
    """

    def __init__(self, path: str):
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = open(path, "wb")  # noqa: SIM115

    def write(self, content: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(content)
        except OSError:
            self.close()

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError:
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


class _Files:
    """The file system that tensorboardX uses for paths with this scheme."""

    def open(self, path: str) -> _LenientFile:
        return _LenientFile(path.removeprefix(f"{_SCHEME}:"))

    def directory_check(self, path: str) -> None:
        """Does nothing: the directory exists."""


register_writer_factory(_SCHEME, _Files())
