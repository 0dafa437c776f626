"""The things that a machine lacks for runs: packages, drivers, memory, a directory that works, and the other machines.

Nothing here loads JAX, which may be what is broken; it is tried in a process of its own.
"""

from swift.tools.doctor.devices import DeviceEvidence, JaxAnswer, ask_jax, examine_devices, judge_devices, tpu_chips
from swift.tools.doctor.directory import examine_directory
from swift.tools.doctor.finding import Finding, Verdict
from swift.tools.doctor.machine import examine_machine
from swift.tools.doctor.meeting import Attendance, Meeting, attending
from swift.tools.doctor.network import examine_network
from swift.tools.doctor.software import examine_software

__all__ = [
    "Attendance",
    "DeviceEvidence",
    "Finding",
    "JaxAnswer",
    "Meeting",
    "Verdict",
    "ask_jax",
    "attending",
    "examine_devices",
    "examine_directory",
    "examine_machine",
    "examine_network",
    "examine_software",
    "judge_devices",
    "tpu_chips",
]
