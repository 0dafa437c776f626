"""Options of ``swift data``, whose imports are loaded when it runs."""

from typing import Any

from swift.cli.console.parser import path_of
from swift.cli.console.shared_options import add_input_hosts, add_insecure_network, add_key


def add_data(commands: Any) -> None:
    """Adds ``swift data``."""
    data = commands.add_parser(
        "data",
        help="profile the input of an experiment, show its plan, measure it, or serve it to other machines",
        description="Profiles a pipeline on its first records, shows the plan that is chosen for it and why, "
        "measures that plan beside the order in which the pipeline is written, or makes its samples for other "
        "machines. CONFIG.gin has an Experiment, or a Pipeline alone.",
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (
        ("profile", "show the time and the bytes of each operator"),
        ("plan", "show the plan that is chosen, why, and what else was possible"),
        ("bench", "measure the plan beside the order as it is written"),
        ("serve", "make samples for other machines, which have the same file"),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("config", type=path_of, metavar="CONFIG.gin")
        action.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
        if name == "serve":
            _add_serving(action)
            continue
        action.add_argument(
            "--records", type=int, help="records of the profile at most (default: one in 50, but 16 to 100)"
        )
        action.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")
        if name != "profile":
            _add_resources(action)
        if name == "bench":
            action.add_argument(
                "--seconds", type=float, default=6.0, help="how long each of both runs (default: %(default)s)"
            )


def _add_resources(action: Any) -> None:
    action.add_argument(
        "--epochs", type=float, default=3.0, help="epochs for which a plan has to be good (default: %(default)s)"
    )
    action.add_argument("--cores", type=int, default=1, help="cores for the input (default: %(default)s)")
    action.add_argument(
        "--memory",
        type=float,
        default=1.0,
        metavar="GB",
        help="memory for samples that are kept (default: %(default)s)",
    )
    action.add_argument("--cache-dir", type=path_of, metavar="DIR", help="directory for kept samples (default: none)")
    add_input_hosts(action)


def _add_serving(action: Any) -> None:
    action.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for the other machines")
    action.add_argument("--processes", type=int, default=1, help="processes that make samples (default: %(default)s)")
    add_key(action)
    add_insecure_network(action)
