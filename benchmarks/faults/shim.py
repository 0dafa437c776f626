"""Control of `shim.c`, a library in the processes of a run that makes file functions fail and shifts the clock."""

import errno
import mmap
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")
_LAYOUT = struct.Struct("qqiii4096s")
_SIZE = 8192
FUNCTIONS = {"open": 1, "read": 2, "write": 4, "sync": 8, "rename": 16}


def built(directory: Path) -> Path | None:
    """Compiles the shim; returns None without a compiler, or on a system that it is not for."""
    library = directory / "shim.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not library.exists() and compiler:
        words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
        subprocess.run(words, capture_output=True, check=False)
    return library if library.exists() else None


class Shim:
    """The shim of one run.

    Args:
        library: path of the library, see `built`.
        path: path of the file through which it is controlled.
        below: directory whose files are affected.
    """

    def __init__(self, library: Path, path: Path, below: Path):
        self._library, self._path, self._below = library, path, below
        path.write_bytes(bytes(_SIZE))
        self.shift_s, self._files = 0.0, (0, 0, 0, 0)
        self._tell()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the run's processes."""
        return {"LD_PRELOAD": str(self._library), "SWIFT_FAULTS_CONTROL": str(self._path)}

    def shift_clock(self, seconds: float) -> None:
        """Sets the wall clock forward or back."""
        self.shift_s = seconds
        self._tell()

    def break_files(self, functions: list[str], *, error: str = "", percent: int = 100, delay_s: float = 0.0) -> None:
        """Makes file functions fail or take longer; without functions, repairs all."""
        which = sum(FUNCTIONS[name] for name in functions)
        self._files = (int(delay_s * 1e9), getattr(errno, error) if error else 0, percent, which)
        self._tell()

    def _tell(self) -> None:
        delay_ns, error, percent, which = self._files
        below = str(self._below).encode()
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), _SIZE) as shared:
            shared[: _LAYOUT.size] = _LAYOUT.pack(int(self.shift_s * 1e9), delay_ns, error, percent, which, below)
