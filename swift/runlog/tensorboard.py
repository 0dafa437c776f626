"""TensorBoard's files of a run: what only a viewer reads, so that trouble with them never holds up or ends the run."""

from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import SummaryWriter
from tensorboardX.record_writer import register_writer_factory

_SCHEME = "swift-file"
_FLUSH_S = 10


def open_board(path: Path, last_step: int) -> Any:
    """A writer of scalars.

    Args:
        path: the directory; made where it is missing.
        last_step: the last iteration that counts: TensorBoard ignores what was written of later ones.
    """
    path.mkdir(exist_ok=True)
    return SummaryWriter(f"{_SCHEME}:{path}", purge_step=last_step + 1, flush_secs=_FLUSH_S)


class _LenientFile:
    """A file that takes no more once something could not be written.

    tensorboardX writes in a thread of its own, which would die of an error, and whoever logs would then wait for it for
    ever: its queue has room for ten values.
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
    """How tensorboardX opens what bears our scheme."""

    def open(self, path: str) -> _LenientFile:
        return _LenientFile(path.removeprefix(f"{_SCHEME}:"))

    def directory_check(self, path: str) -> None:
        """Nothing: the directory is there."""


register_writer_factory(_SCHEME, _Files())
