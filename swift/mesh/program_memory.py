"""Memory of a compiled program on each of its devices, as the compiler reports it."""

from dataclasses import dataclass
from typing import Any, Self

from jax.stages import Compiled


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes that a program takes on a device; result buffers that reuse arguments count once.

    Attributes:
        arguments: bytes of what it is given, such as the state.
        results: bytes of results that do not reuse arguments.
        temporary: bytes of buffers that it has while it runs.
        code: bytes of the program itself.
        host: bytes of arguments, results and temporary buffers in host memory, which are not among those above.
    """

    arguments: int
    results: int
    temporary: int
    code: int
    host: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(cls, compiled: Compiled) -> Self | None:
        """Reads the compiler's own account of a program; None: this compiler keeps none."""
        stats: Any = compiled.memory_analysis()
        if stats is None:
            return None
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes - stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
            (
                stats.host_argument_size_in_bytes,
                stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes,
                stats.host_temp_size_in_bytes,
            ),
        )

    @property
    def needed(self) -> int:
        """Bytes of device memory in all."""
        return self.arguments + self.results + self.temporary + self.code
