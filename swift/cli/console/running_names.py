"""Names that threads of a process note, and that its parent can read once the process has ended."""

import itertools
import mmap
import threading

_NAME_BYTES, _NUM_SLOTS = 128, 256


class RunningNames:
    """Names of what each thread runs, in memory that a process shares with the children that it forks afterwards.

    A note costs about a microsecond. Long names are cut, and of more than 256 threads some lose their note, as do
    threads of an operator that forks and runs operators itself.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUM_SLOTS * _NAME_BYTES)
        self._own, self._numbers = threading.local(), itertools.count()

    def note(self, name: str) -> None:
        """Notes what this thread runs from now on; an empty name: nothing."""
        try:
            begin = self._own.begin
        except AttributeError:
            begin = self._own.begin = next(self._numbers) % _NUM_SLOTS * _NAME_BYTES
        self._memory[begin : begin + _NAME_BYTES] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")

    def names(self) -> list[str]:
        """Returns the names of what runs, each once, in their order."""
        begins = range(0, len(self._memory), _NAME_BYTES)
        found = {self._memory[begin : begin + _NAME_BYTES].rstrip(b"\0") for begin in begins}
        return sorted(name.decode(errors="ignore") for name in found if name)
