"""Options of the command that examines machines."""

from typing import Any

from swift.cli.console.parser import path_of


def add_doctor(commands: Any) -> None:
    """Adds ``swift doctor``."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine, or several together, lack for runs",
        description="Looks at packages, drivers and devices, memory, the directory for runs and the network; with "
        "several nodes, on each of which it is started, also at whether they reach one another and run the same. "
        "Exit code 3 if something is missing.",
    )
    scope = doctor.add_mutually_exclusive_group()
    scope.add_argument("--host", action="store_true", help="this machine alone, also under srun")
    scope.add_argument("--nodes", type=int, metavar="N", help="machines (default: as many as srun has tasks, or 1)")
    doctor.add_argument(
        "--node",
        type=int,
        metavar="I",
        help="which of them this is, from 0 (default: what srun or an indexed Kubernetes job says)",
    )
    doctor.add_argument(
        "--listen", metavar="HOST", help="where the others find this one (default: the address of its own name)"
    )
    doctor.add_argument(
        "--run-dir", type=path_of, metavar="DIR", help="where runs shall be written; several nodes meet there"
    )
    doctor.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")
