"""Options that several commands have."""

import argparse

from swift.cli.console.parser import path_of


def add_deadlines(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds ``--deadline``.

    Args:
        parser: parser of a command.
        meaning: names and meanings of the deadlines, for ``--help``.
    """
    parser.add_argument(
        "--deadline",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=SECONDS",
        help=f"how long to wait: {meaning}",
    )


def add_stopping(parser: argparse.ArgumentParser) -> None:
    """Adds the deadline of a run in one process."""
    add_deadlines(parser, "stopping (from Ctrl-C or SIGTERM to the end of the process, with a checkpoint)")


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Adds the options for reporting a run's progress."""
    parser.add_argument(
        "--log-every",
        type=int,
        metavar="N",
        help="a line every N iterations, on a terminal too (default: about ten lines, and a bar on a terminal)",
    )
    parser.add_argument(
        "--logger",
        action="append",
        default=[],
        choices=["wandb", "mlflow"],
        help="also send the numbers of the run there, as set by the package's own environment variables (needs the "
        "extra of that name)",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run on several hosts."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="run on several hosts, on each of which this command is started: where host 0 is found by the others; "
        "auto: where JAX knows the surroundings (Slurm, Open MPI, TPU virtual machines, Kubernetes)",
    )
    parser.add_argument("--num-hosts", type=int, metavar="N", help="how many hosts there are")
    parser.add_argument("--host", type=int, metavar="I", help="which of them this is, from 0")


def add_input_hosts(parser: argparse.ArgumentParser, *, has_network: bool = False) -> None:
    """Adds the options for input hosts.

    Args:
        parser: parser of a command.
        has_network: whether it has the option that permits a network already.
    """
    parser.add_argument(
        "--input-hosts",
        metavar="HOST:PORT,...",
        help="machines where `swift data serve` makes samples of this pipeline, or of the sources of this mixture "
        "(default: none)",
    )
    add_key(parser)
    if not has_network:
        add_insecure_network(parser)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Adds ``--key-file``."""
    parser.add_argument(
        "--key-file",
        type=path_of,
        metavar="FILE",
        help="key that input hosts and the machines that they serve prove to have to each other; `swift data serve` "
        "makes the file if there is none",
    )


def add_insecure_network(parser: argparse.ArgumentParser) -> None:
    """Adds ``--insecure-network``, for samples and the hosts of a run."""
    parser.add_argument(
        "--insecure-network",
        action="store_true",
        help="permit a network to input hosts, or between the hosts of a run: nothing there is encrypted",
    )


def add_prepare(parser: argparse.ArgumentParser, *, depends_on: str = "") -> None:
    """Adds ``--prepare``; its default is None where it depends on something, which the help then says."""
    parser.add_argument(
        "--prepare",
        choices=["none", "next"],
        default=None if depends_on else "next",
        help="plan and compile in the background what the next failure or return of a worker would need, or none "
        f"(default: next{depends_on})",
    )


def add_config(parser: argparse.ArgumentParser, name: str = "--config", run: str = "the run") -> None:
    """Adds ``--config``, for the user's own classes that a run was trained with, or the like option for another run."""
    parser.add_argument(
        name,
        type=path_of,
        metavar="CONFIG.gin",
        help=f"a configuration that has the policy, optimizer or tokenizer of your own with which {run} was "
        "trained; this file is run as a program, those stored beside the weights never are",
    )


def add_expert_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds ``--expert-ranks``, for commands whose answers come from the engine."""
    parser.add_argument(
        "--expert-ranks",
        type=int,
        default=1,
        metavar="N",
        help="spread the experts of every layer over so many devices, emulated ones unless the model was trained on "
        "the machine's own (default: %(default)s)",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of a run, its directory, and the format of the result."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
    parser.add_argument("--run-dir", type=path_of, metavar="DIR", help="default: a new directory under runs/")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="of the result on stdout")


def add_init_from(parser: argparse.ArgumentParser) -> None:
    """Adds ``--init-from`` and ``--init-config``."""
    parser.add_argument(
        "--init-from",
        type=path_of,
        metavar="RUN_DIR",
        help="begin a new run, at iteration 0, with the weights of the newest checkpoint of another run",
    )
    add_config(parser, "--init-config", "that run")
