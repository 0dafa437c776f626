"""Options of the command ``evaluate``."""

from typing import Any

from swift.cli.console.parser import path_of
from swift.cli.console.shared_options import add_config, add_expert_ranks


def add_evaluate(commands: Any) -> None:
    """Adds ``evaluate`` to the parser of commands."""
    evaluate = commands.add_parser("evaluate", help="ask models the questions of a file, and count the right answers")
    evaluate.add_argument(
        "models", type=path_of, nargs="+", metavar="DIR", help="a run, or a model of `swift export` or `swift import`"
    )
    evaluate.add_argument(
        "--tasks", type=path_of, required=True, metavar="TASKS.jsonl", help="the questions, a JSON object on each line"
    )
    add_config(evaluate, run="every DIR")
    evaluate.add_argument("--step", type=int, help="of the runs' checkpoints (default: the newest that is sound)")
    evaluate.add_argument(
        "--out", type=path_of, metavar="FILE", help="write all results to this file, and none into the directories"
    )
    add_expert_ranks(evaluate)
    evaluate.add_argument("--resume", action="store_true", help="continue an evaluation that was stopped")
    evaluate.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")
