"""The command line: all commands and their options."""

import argparse
from typing import Any

from swift.cli.console.evaluating import add_evaluate
from swift.cli.console.input import add_data
from swift.cli.console.machines import add_doctor
from swift.cli.console.parser import OneLineParser, ShowVersion, path_of
from swift.cli.console.planning import add_compile, add_place, add_plan, add_simulate
from swift.cli.console.shared_options import (
    add_config,
    add_deadlines,
    add_expert_ranks,
    add_hosts,
    add_init_from,
    add_input_hosts,
    add_prepare,
    add_progress,
    add_settings,
    add_stopping,
)

HIDDEN = ("member", "keeper", "preparer")
"""Commands of the processes that ``launch`` starts."""
_INSTEAD = {
    "extend": "train CONFIG.gin --run-dir RUN_DIR --resume --set Experiment.num_steps=N",
    "resume": "train CONFIG.gin --run-dir RUN_DIR --resume",
    "fork": "train CONFIG.gin --init-from RUN_DIR",
}
"""Words for what options of ``train`` do."""


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of all commands and their options."""
    parser = OneLineParser(prog="swift", description="Mixture-of-experts training that adapts to load and failures.")
    parser.hidden, parser.instead = (*HIDDEN, "compiler"), _INSTEAD
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the versions of Swift and JAX, and exit")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run one experiment")
    train.add_argument("config", type=path_of, metavar="CONFIG.gin")
    add_settings(train)
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")
    train.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this iteration, with a checkpoint")
    add_init_from(train)
    add_progress(train)
    add_prepare(train)
    add_stopping(train)
    add_hosts(train)
    add_input_hosts(train)
    train.add_argument("--profile", metavar="FIRST:LAST", help="trace these iterations with JAX's profiler")

    compare = commands.add_parser("compare", help="run several experiments one after another and compare them")
    compare.add_argument("configs", type=path_of, nargs="+", metavar="CONFIG.gin")
    add_settings(compare)
    compare.add_argument(
        "--resume", action="store_true", help="continue a comparison in --run-dir: what has ended is not run again"
    )
    add_progress(compare)
    add_stopping(compare)
    add_hosts(compare)
    add_input_hosts(compare)

    launch = commands.add_parser("launch", help="run one experiment, a process for each worker, which may die")
    launch.add_argument("config", type=path_of, metavar="CONFIG.gin")
    add_settings(launch)
    launch.add_argument(
        "--processes", type=int, required=True, help="as many as the topology has workers, or expert ranks"
    )
    launch.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")
    add_init_from(launch)
    launch.add_argument(
        "--nodes",
        type=int,
        help="machines that share the processes; each runs the same command (default: as many as srun has tasks, or 1)",
    )
    launch.add_argument(
        "--node", type=int, help="which of them this is, from 0 (default: what srun or an indexed Kubernetes job says)"
    )
    launch.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="where node 0 is found by the others (default: the address of its own name, any port)",
    )
    launch.add_argument(
        "--insecure-network",
        action="store_true",
        help="the network between the nodes, and to input hosts, is trusted: what is said there is not encrypted",
    )
    launch.add_argument(
        "--platform",
        choices=["cpu", "gpu", "tpu"],
        default="cpu",
        help="what the processes compute on: a GPU for each expert rank, or all chips of a TPU host for each process "
        "(default: %(default)s)",
    )
    launch.add_argument(
        "--recovery",
        choices=["live", "restart"],
        help="after a death the others continue in their processes, or are started again and find their state "
        "(default: live; restart on GPUs and TPUs, where there is no other way)",
    )
    launch.add_argument(
        "--copy-every",
        type=int,
        metavar="N",
        help="with --recovery restart: iterations between copies of the state in memory, from which all start again "
        "(default: 1)",
    )
    launch.add_argument(
        "--restarts",
        type=int,
        default=10,
        help="how often a process is started again before the run continues without it (default: %(default)s)",
    )
    add_deadlines(
        launch,
        "start, forming (a generation), heartbeat, progress (of an iteration), saving (of a checkpoint), dying (of a "
        "process that was killed), stopping (from Ctrl-C or SIGTERM until the last iteration is saved)",
    )
    launch.add_argument(
        "--against", type=path_of, metavar="RUN_DIR", help="say at the end how far the loss is from that of another run"
    )
    add_input_hosts(launch, has_network=True)
    add_progress(launch)
    add_prepare(launch, depends_on="; none on GPUs and TPUs")
    launch.add_argument(
        "--chaos",
        nargs="+",
        action="extend",
        default=[],
        metavar="LINE",
        help="such as 'step 20: kill 1:1' 'step 40: restart 1:1'; a line that ends in 'once prepared' waits until the "
        "programs for it are there",
    )

    for kind in HIDDEN:
        hidden = commands.add_parser(kind)
        hidden.add_argument("scratch", type=path_of)
        hidden.add_argument("memory", type=path_of)
        hidden.add_argument("--by-rank", action="store_true")
        if kind == "member":
            hidden.add_argument("--copy-every", type=int, default=0)
            hidden.add_argument("--forming", type=float, required=True)
            hidden.add_argument("--platform", choices=["gpu", "tpu"])
            hidden.add_argument("--device", type=int, action="append", default=[])
            for name in ("pipeline", "stage", "rank"):
                hidden.add_argument(name, type=int)
        elif kind == "keeper":
            for name in ("--init-from", "--init-config"):
                hidden.add_argument(name, type=path_of)
            hidden.add_argument("run_dir", type=path_of)

    report = commands.add_parser("report", help="write one HTML page about a run, or about several together")
    report.add_argument("run_dirs", type=path_of, nargs="+", metavar="RUN_DIR")
    report.add_argument("--out", type=path_of, help="the page (default: report.html in the first RUN_DIR)")

    export = commands.add_parser("export", help="write a run's model as a plain single-device checkpoint")
    export.add_argument("run_dir", type=path_of, metavar="RUN_DIR", help="with --format hf also a model directory")
    export.add_argument("--out", type=path_of, required=True, metavar="MODEL", help="the directory to make")
    add_config(export)
    export.add_argument("--step", type=int, help="of the checkpoint (default: the newest that is sound)")

    export.add_argument(
        "--format",
        choices=["swift", "hf"],
        default="swift",
        help="hf: a directory that Hugging Face's transformers loads (default: %(default)s)",
    )
    export.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="with hf: type of all tensors (default: float32 of a run, of an imported model each tensor's own)",
    )

    bring = commands.add_parser("import", help="make a model of a Hugging Face directory")
    bring.add_argument(
        "directory", type=path_of, metavar="DIR", help="with config.json, tokenizer.json and safetensors"
    )
    bring.add_argument("--out", type=path_of, required=True, metavar="MODEL", help="the directory to make")

    generate = commands.add_parser("generate", help="continue a text with an exported model")
    generate.add_argument("model", type=path_of, metavar="MODEL")
    add_config(generate)
    generate.add_argument(
        "--prompt", action="append", help="the text to continue (default: 'def '); several at once, each with --prompt"
    )
    generate.add_argument("--tokens", type=int, default=200, help="how many to add (default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (default: %(default)s)")
    generate.add_argument("--top-k", type=int, default=40, help="choose among so many (default: %(default)s)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="choose among the likeliest of this probability (default: %(default)s)"
    )
    generate.add_argument("--seed", type=int, default=0)
    add_expert_ranks(generate)
    generate.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="json: a line with prompt and text for each prompt (default: %(default)s)",
    )

    add_evaluate(commands)

    checkpoint = commands.add_parser("checkpoint", help="list, inspect or verify the checkpoints of a run")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (
        ("list", "list the iterations that can be restored"),
        ("inspect", "show where the newest copy of every expert lies, and what a restore would do"),
        ("verify", "read all files and their values; exit code 3 where one is damaged"),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("dir", type=path_of, metavar="DIR", help="a run, all its checkpoints, or one of them")
        action.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")
        if name == "inspect":
            action.add_argument("--step", type=int, help="iteration of the checkpoint (default: the newest)")

    settings = commands.add_parser("settings", help="list every setting, with its type, default and meaning")
    settings.add_argument("name", nargs="?", metavar="NAME", help="such as OptimizerConfig, or Experiment.num_steps")
    settings.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")

    config = commands.add_parser("config", help="print all settings of an experiment, defaults included")
    config.add_argument("config", type=path_of, metavar="CONFIG.gin")
    config.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")

    add_compile(commands)
    add_data(commands)
    add_doctor(commands)
    add_place(commands)
    add_plan(commands)
    add_simulate(commands)
    parser.commands = commands.choices
    return parser
