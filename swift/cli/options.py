"""Defines all commands and their options.

Options shared by several commands come first, then those of single commands, then the parser. This module imports
nothing large: a command's own module is imported when the command runs.
"""

import argparse
from typing import Any

from swift.cli.parser import OneLineParser, ShowVersion, path_of, step_of

HIDDEN = ("worker", "checkpoint-service", "compile-service")
"""Commands that ``launch`` uses to start its processes; users never see them."""
_INSTEAD = {
    "extend": "train CONFIG.gin --run-dir RUN_DIR --resume --set Experiment.num_steps=N",
    "resume": "train CONFIG.gin --run-dir RUN_DIR --resume",
    "fork": "train CONFIG.gin --init-from RUN_DIR",
    "help": "--help",
    "version": "--version",
}
"""Words that users may try as commands, each with the command line to suggest instead."""


def _add_deadlines(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds ``--deadline``.

    Args:
        parser: parser of the command.
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


def _add_stopping(parser: argparse.ArgumentParser) -> None:
    """Adds ``--deadline`` for a run in one process, whose only deadline is ``stopping``."""
    _add_deadlines(parser, "stopping (from Ctrl-C or SIGTERM to the end of the process, with a checkpoint)")


def _add_progress(parser: argparse.ArgumentParser) -> None:
    """Adds the options for showing a run's progress: ``--log-every`` and ``--logger``."""
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


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a run on several hosts: ``--coordinator``, ``--num-hosts`` and ``--host``."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="run on several hosts, on each of which this command is started: where host 0 is found by the others; "
        "auto: where JAX knows the surroundings (Slurm, Open MPI, TPU virtual machines, Kubernetes)",
    )
    parser.add_argument("--num-hosts", type=int, metavar="N", help="how many hosts there are")
    parser.add_argument("--host", type=int, metavar="I", help="which of them this is, from 0")


def _add_input_hosts(parser: argparse.ArgumentParser, *, has_network: bool = False) -> None:
    """Adds the options for input hosts.

    Args:
        parser: parser of the command.
        has_network: whether the parser already has ``--insecure-network``.
    """
    parser.add_argument(
        "--input-hosts",
        metavar="HOST:PORT,...",
        help="machines where `swift data serve` makes samples of this pipeline, or of the sources of this mixture "
        "(default: none)",
    )
    _add_key(parser)
    if not has_network:
        _add_insecure_network(parser)


def _add_key(parser: argparse.ArgumentParser) -> None:
    """Adds ``--key-file``."""
    parser.add_argument(
        "--key-file",
        type=path_of,
        metavar="FILE",
        help="key that input hosts and the machines that they serve prove to have to each other; `swift data serve` "
        "makes the file if there is none",
    )


def _add_insecure_network(parser: argparse.ArgumentParser) -> None:
    """Adds ``--insecure-network``, for connections to input hosts and between the hosts of a run."""
    parser.add_argument(
        "--insecure-network",
        action="store_true",
        help="permit a network to input hosts, or between the hosts of a run: nothing there is encrypted",
    )


def _add_prepare(parser: argparse.ArgumentParser, *, depends_on: str = "") -> None:
    """Adds ``--prepare``.

    Args:
        parser: parser of the command.
        depends_on: text for ``--help`` on how the default depends on other options; if set, the default is None.
    """
    parser.add_argument(
        "--prepare",
        choices=["none", "next"],
        default=None if depends_on else "next",
        help="plan and compile in the background what the next failure or return of a worker would need, or none "
        f"(default: next{depends_on})",
    )


def _add_config(parser: argparse.ArgumentParser, name: str = "--config", run: str = "the run") -> None:
    """Adds an option, by default ``--config``, for a gin file with the user's own classes that a run needs."""
    parser.add_argument(
        name,
        type=path_of,
        metavar="CONFIG.gin",
        help=f"a configuration that has the policy, optimizer or tokenizer of your own with which {run} was "
        "trained; this file is run as a program, those stored beside the weights never are",
    )


def _add_expert_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds ``--expert-ranks``, for commands that use the inference engine."""
    parser.add_argument(
        "--expert-ranks",
        type=int,
        default=1,
        metavar="N",
        help="spread the experts of every layer over so many devices, emulated ones unless the model was trained on "
        "the machine's own (default: %(default)s)",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, ``--run-dir`` and ``--format``."""
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
    parser.add_argument("--run-dir", type=path_of, metavar="DIR", help="default: a new directory under runs/")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="of the result on stdout")


def _add_init_from(parser: argparse.ArgumentParser) -> None:
    """Adds ``--init-from`` and ``--init-config``."""
    parser.add_argument(
        "--init-from",
        type=path_of,
        metavar="RUN_DIR",
        help="begin a new run, at iteration 0, with the weights of the newest checkpoint of another run",
    )
    _add_config(parser, "--init-config", "that run")


def _add_step(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds ``--step``."""
    best = "best: the one with the lowest validation loss"
    parser.add_argument(
        "--step", type=step_of, metavar="STEP", help=f"{what}; {best} (default: the newest that is sound)"
    )


def _add_reference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare-loss-to",
        type=path_of,
        metavar="RUN_DIR",
        help="say at the end how far the loss is from that of another run",
    )


def _add_evaluate(commands: Any) -> None:
    """Adds ``swift evaluate``."""
    evaluate = commands.add_parser("evaluate", help="ask models the questions of a file, and count the right answers")
    evaluate.add_argument(
        "models", type=path_of, nargs="+", metavar="DIR", help="a run, or a model of `swift export` or `swift import`"
    )
    evaluate.add_argument(
        "--tasks", type=path_of, required=True, metavar="TASKS.jsonl", help="the questions, a JSON object on each line"
    )
    _add_config(evaluate, run="every DIR")
    _add_step(evaluate, "of the runs' checkpoints")
    evaluate.add_argument(
        "--out", type=path_of, metavar="FILE", help="write all results to this file, and none into the directories"
    )
    _add_expert_ranks(evaluate)
    evaluate.add_argument("--resume", action="store_true", help="continue an evaluation that was stopped")
    evaluate.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")


def _add_watch(commands: Any) -> None:
    """Adds ``swift watch``."""
    watch = commands.add_parser("watch", help="show runs while they train, or after they ended; reads only")
    watch.add_argument(
        "runs", type=path_of, nargs="+", metavar="RUN", help="directory of a run, which may not exist yet"
    )
    watch.add_argument(
        "--refresh",
        type=float,
        metavar="SECONDS",
        help="time between two views (default: 1), or between two pages with --serve (default: 10)",
    )
    how = watch.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="print one view and end (also where stdout is no terminal, or a dumb one)"
    )
    how.add_argument(
        "--serve",
        type=_port,
        nargs="?",
        const=0,
        metavar="PORT",
        help="serve the runs' report to browsers of this machine, and keep it new (default: any free port)",
    )


def _port(text: str) -> int:
    """Converts a port; rejects anything else, such as a run after ``--serve``."""
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a port, from 1 to 65535; a RUN comes before --serve")
    return int(text)


def _add_data(commands: Any) -> None:
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
    _add_input_hosts(action)


def _add_serving(action: Any) -> None:
    action.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for the other machines")
    action.add_argument("--processes", type=int, default=1, help="processes that make samples (default: %(default)s)")
    _add_key(action)
    _add_insecure_network(action)


def _add_doctor(commands: Any) -> None:
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


def _add_compile(commands: Any) -> None:
    """Adds ``swift compile``, and the hidden command ``compiler`` that it starts for each configuration."""
    compile_for = commands.add_parser(
        "compile",
        help="compile an experiment's step for a pod without one",
        description="Compiles an experiment's step for a pod without having one, and reports whether it fits, what it "
        "exchanges and how long it would take. Exit code 3 if a configuration cannot run there.",
    )
    compile_for.add_argument("config", type=path_of, metavar="CONFIG.gin")
    compile_for.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")
    compile_for.add_argument(
        "--topology", required=True, metavar="NAME", help="pod, such as v5e:4x4, v5p:4x4x4, v6e:4x4, h100:1x8, cpu:8"
    )
    compile_for.add_argument(
        "--fail",
        nargs="+",
        action="extend",
        metavar="d:p",
        help="workers that are down, as pipeline:stage (default: none, and each failure set of Experiment.failures)",
    )
    compile_for.add_argument(
        "--neighbours", action="store_true", help="also compile every configuration that is one failure or return away"
    )
    compile_for.add_argument(
        "--jobs", type=int, default=1, help="configurations to compile at a time (default: %(default)s)"
    )
    compile_for.add_argument(
        "--format", choices=["text", "json"], default="text", help="format of the result on stdout"
    )
    commands.add_parser("compiler")


def _add_place(commands: Any) -> None:
    """Adds ``swift place``."""
    place = commands.add_parser(
        "place",
        help="place experts on ranks by their loads",
        description="Places replicas of experts on ranks by their loads, and says how even the ranks' loads are then.",
    )
    place.add_argument(
        "loads", type=path_of, metavar="LOADS.npy", help="tokens of each expert, [experts] or [layers, experts]"
    )
    place.add_argument("--ranks", type=int, required=True, metavar="N", help="expert ranks")
    place.add_argument("--slots", type=int, required=True, metavar="S", help="slots of a rank")
    place.add_argument(
        "--policy", default="packed", metavar="NAME", help="packed, minmax, symi or static (default: %(default)s)"
    )
    place.add_argument(
        "--out", type=path_of, metavar="FILE.npy", help="write the expert in every slot, int32[layers, ranks, slots]"
    )
    place.add_argument(
        "--plot", type=path_of, metavar="FILE", help="draw the load by rank, before and after, into this .svg or .png"
    )
    place.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")


def _add_plan(commands: Any) -> None:
    """Adds ``swift plan``."""
    plan = commands.add_parser(
        "plan",
        help="plan a pipeline schedule around failed workers",
        description="Plans a pipeline schedule in which the peers of failed workers run their micro-batches. Times and "
        "memory are in the unit of --costs; without them F, B and W take 1 each, and an F-stash is 1.",
    )
    plan.add_argument("--pipelines", type=int, required=True, metavar="D", help="data-parallel pipelines")
    plan.add_argument("--stages", type=int, required=True, metavar="P", help="stages of a pipeline")
    plan.add_argument(
        "--microbatches", required=True, metavar="M", help="micro-batches of every pipeline, or M,M,... of each one"
    )
    plan.add_argument("--blocks", type=int, metavar="L", help="layers of the model, cut by their costs into stages")
    plan.add_argument(
        "--cut",
        nargs="+",
        metavar="N,N,...",
        help="blocks of each stage, once for all pipelines or once for each (default: by costs)",
    )
    plan.add_argument(
        "--embedding",
        type=float,
        default=0.0,
        metavar="X",
        help="time of the embedding's gradient, in blocks (default: 0)",
    )
    plan.add_argument("--head", type=float, default=0.0, metavar="X", help="time of the head, in blocks (default: 0)")
    plan.add_argument(
        "--fail", nargs="+", action="extend", default=[], metavar="d:p", help="workers that are down, as pipeline:stage"
    )
    plan.add_argument(
        "--adapt",
        nargs="?",
        const="auto",
        metavar="MODE",
        help="what the survivors do: reroute (nothing moves), reassign (workers take failed ones' places), recut "
        "(pipelines of unequal length, cut anew), or auto, the best of them (without a MODE)",
    )
    plan.add_argument(
        "--downtime", default="", metavar="DURATION", help="time until the workers return, for auto (default: endless)"
    )
    plan.add_argument(
        "--block-bytes", type=float, default=3.5e9, metavar="X", help="state of a block (default: %(default)g)"
    )
    plan.add_argument(
        "--bandwidth", type=float, default=12.5e9, metavar="X", help="bytes/s between workers (default: %(default)g)"
    )
    plan.add_argument(
        "--memory-limit", type=float, metavar="UNITS", help="memory of a worker, in F-stashes (default: no limit)"
    )
    plan.add_argument(
        "--costs",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="times tF tB tW (1) and tU tComm (0); memory of F-stash (1), W-stash (as F-stash) and inbox (0), for one "
        "message",
    )
    plan.add_argument(
        "--iterations", type=int, default=3, metavar="K", help="iterations of the window (default: %(default)s)"
    )
    plan.add_argument(
        "--solver",
        default="adaptive",
        metavar="NAME",
        help="adaptive, lockstep (to run as one SPMD program), milp (exact, for small cases), v (two runs of blocks a "
        "worker: the first and the last of the model on stage 0, and so on inwards); without failures also "
        "gpipe, one_f_one_b, zero_bubble (default: %(default)s)",
    )
    plan.add_argument("--no-decouple", action="store_true", help="tie every W to its B, as a plain backward pass does")
    plan.add_argument("--no-stagger", action="store_true", help="delay all updates until all stages have finished")
    plan.add_argument(
        "--format",
        choices=["text", "json", "svg", "trace"],
        help="format of the result on stdout or in --out; trace is for ui.perfetto.dev (default: text, or by the "
        "suffix of --out)",
    )
    plan.add_argument("--ops", action="store_true", help="list all ops in --format json")
    plan.add_argument(
        "--out", type=path_of, metavar="FILE", help="write to this file, not to stdout; a picture may be .svg or .png"
    )
    plan.add_argument("--store", type=path_of, metavar="DIR", help="directory in which plans are kept and looked up")
    plan.add_argument(
        "--prepare",
        type=int,
        metavar="F",
        help="count the plans for up to F failures, after normalization; with --store, make the missing ones",
    )


def _add_simulate(commands: Any) -> None:
    """Adds ``swift simulate``."""
    simulate = commands.add_parser(
        "simulate",
        help="simulate strategies on a failure trace",
        description="Simulates a training job whose workers fail and return. A worker is a node of the trace. "
        "Durations are such as 90s, 10m, 6h, 2d.",
    )
    simulate.add_argument("--pipelines", type=int, required=True, metavar="D", help="data-parallel pipelines")
    simulate.add_argument("--stages", type=int, required=True, metavar="P", help="stages of a pipeline")
    simulate.add_argument("--microbatches", type=int, required=True, metavar="M", help="micro-batches of a pipeline")
    simulate.add_argument(
        "--expert-ranks", type=int, default=1, metavar="R", help="devices of a worker (default: %(default)s)"
    )
    simulate.add_argument(
        "--trace",
        type=path_of,
        metavar="FILE",
        help="rows of milliseconds,add|remove,node, or of YYYY-MM-DD, HH:MM:SS, live nodes",
    )
    simulate.add_argument("--mtbf", metavar="DURATION", help="random failures: mean time between two, of any worker")
    simulate.add_argument(
        "--weibull", type=float, metavar="SHAPE", help="shape of the times between failures (default: Poisson)"
    )
    simulate.add_argument(
        "--repair",
        default="60s",
        metavar="DURATION",
        help="time until a failed worker, or a spare, is ready (default: 60s)",
    )
    simulate.add_argument("--duration", default="24h", help="length of the random trace (default: %(default)s)")
    simulate.add_argument("--remove-every", metavar="DURATION", help="one worker fails each time, and none returns")
    simulate.add_argument(
        "--num-failures", type=int, metavar="N", help="number of these failures (default: half of the workers)"
    )
    simulate.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)")
    simulate.add_argument(
        "--costs", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="as for plan, in any unit of time"
    )
    simulate.add_argument("--memory-limit", type=float, metavar="UNITS", help="as for plan (default: no limit)")
    simulate.add_argument(
        "--job",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="iteration (2) in s; state (26e9) in bytes, expert-share (0.86) of it, experts (16) of a layer; bytes/s "
        "to host (25e9, of each device), network (12.5e9, of each worker), storage (2e9, of all); restart (17) "
        "in s; checkpoint-every in iterations (default: what suits each strategy), K (1) experts in a partial one",
    )
    simulate.add_argument(
        "--model",
        metavar="NAME",
        help="model whose published figures oobleck, varuna and bamboo follow: bert-large, gpt-2, gpt3-medium, "
        "gpt3-2.7b, gpt3-6.7b",
    )
    simulate.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help="ideal, swift, recycle, memory, moc, full, oobleck, varuna or bamboo; may be given several times "
        "(default: all that can run); or adapt, which cuts pipelines anew where it pays",
    )
    simulate.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")
    simulate.add_argument("--plot", type=path_of, metavar="FILE", help="draw goodput over time into this .svg or .png")


def _add_compare(commands: Any) -> None:
    """Adds ``swift compare``, and the hidden command ``compared`` that it starts for each run."""
    compare = commands.add_parser("compare", help="run several experiments, or one with varied settings, and compare")
    compare.add_argument("configs", type=path_of, nargs="+", metavar="CONFIG.gin")
    _add_settings(compare)
    compare.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE,...",
        help="run with each of these values; several --vary: with each combination of their values",
    )
    compare.add_argument("--seeds", metavar="SEEDS", help="run with each of these seeds, such as 0-4 or 0,3,10-12")
    compare.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at a time, each in a process of its own (default: with --vary or --seeds, as many as have cores or "
        "devices of their own; else the runs follow one another in one process)",
    )
    compare.add_argument(
        "--task",
        type=int,
        metavar="I",
        help="run only the run with this number, from 0, such as $SLURM_ARRAY_TASK_ID; it resumes if it has begun",
    )
    compare.add_argument(
        "--resume", action="store_true", help="continue a comparison in --run-dir: what has ended is not run again"
    )
    _add_progress(compare)
    _add_stopping(compare)
    _add_hosts(compare)
    _add_input_hosts(compare)
    compared = commands.add_parser("compared")
    compared.add_argument("arguments", nargs=argparse.REMAINDER)


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of all commands and their options."""
    parser = OneLineParser(prog="swift", description="Mixture-of-experts training that adapts to load and failures.")
    parser.hidden, parser.instead = (*HIDDEN, "compiler", "compared"), _INSTEAD
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the versions of Swift and JAX, and exit")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run one experiment")
    train.add_argument("config", type=path_of, metavar="CONFIG.gin")
    _add_settings(train)
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")
    train.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this iteration, with a checkpoint")
    _add_init_from(train)
    _add_progress(train)
    _add_prepare(train)
    _add_stopping(train)
    _add_hosts(train)
    _add_input_hosts(train)
    _add_reference(train)
    train.add_argument("--profile", metavar="FIRST:LAST", help="trace these iterations with JAX's profiler")

    _add_compare(commands)

    launch = commands.add_parser("launch", help="run one experiment, a process for each worker, which may die")
    launch.add_argument("config", type=path_of, metavar="CONFIG.gin")
    _add_settings(launch)
    launch.add_argument(
        "--processes", type=int, required=True, help="as many as the topology has workers, or expert ranks"
    )
    launch.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")
    _add_init_from(launch)
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
        help="what happens to the surviving processes after a death: live keeps them running, restart starts them "
        "again from copies in memory (default: live; restart on GPUs and TPUs, where there is no other way)",
    )
    launch.add_argument(
        "--memory-checkpoint-every",
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
    _add_deadlines(
        launch,
        "start, forming (a generation), heartbeat, progress (of an iteration), saving (of a checkpoint), dying (of a "
        "process that was killed), stopping (from Ctrl-C or SIGTERM until the last iteration is saved)",
    )
    _add_reference(launch)
    _add_input_hosts(launch, has_network=True)
    _add_progress(launch)
    _add_prepare(launch, depends_on="; none on GPUs and TPUs")
    launch.add_argument(
        "--chaos",
        nargs="+",
        action="extend",
        default=[],
        metavar="LINE",
        help="such as 'step 20: kill 1:1' 'step 40: restart 1:1'; a line that ends in 'once compiled' waits until the "
        "programs for it are there",
    )

    for kind in HIDDEN:
        hidden = commands.add_parser(kind)
        hidden.add_argument("scratch", type=path_of)
        hidden.add_argument("memory", type=path_of)
        hidden.add_argument("--by-rank", action="store_true")
        if kind == "worker":
            hidden.add_argument("--memory-checkpoint-every", type=int, default=0)
            hidden.add_argument("--forming", type=float, required=True)
            hidden.add_argument("--platform", choices=["gpu", "tpu"])
            hidden.add_argument("--device", type=int, action="append", default=[])
            for name in ("pipeline", "stage", "rank"):
                hidden.add_argument(name, type=int)
        elif kind == "checkpoint-service":
            for name in ("--init-from", "--init-config"):
                hidden.add_argument(name, type=path_of)
            hidden.add_argument("run_dir", type=path_of)

    report = commands.add_parser("report", help="write one HTML page about a run, or about several together")
    report.add_argument("run_dirs", type=path_of, nargs="+", metavar="RUN_DIR")
    report.add_argument("--out", type=path_of, help="the page (default: report.html in the first RUN_DIR)")

    _add_watch(commands)

    export = commands.add_parser("export", help="write a run's model as a plain single-device checkpoint")
    export.add_argument("run_dir", type=path_of, metavar="RUN_DIR", help="with --format hf also a model directory")
    export.add_argument("--out", type=path_of, required=True, metavar="MODEL", help="the directory to make")
    _add_config(export)
    _add_step(export, "of the checkpoint")

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
    _add_config(generate)
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
    _add_expert_ranks(generate)
    generate.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="json: a line with prompt and text for each prompt (default: %(default)s)",
    )

    _add_evaluate(commands)

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
            _add_step(action, "iteration of the checkpoint")

    settings = commands.add_parser("settings", help="list every setting, with its type, default and meaning")
    settings.add_argument("name", nargs="?", metavar="NAME", help="such as OptimizerConfig, or Experiment.num_steps")
    settings.add_argument("--format", choices=["text", "json"], default="text", help="format of the result on stdout")

    config = commands.add_parser("config", help="print all settings of an experiment, defaults included")
    config.add_argument("config", type=path_of, metavar="CONFIG.gin")
    config.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting")

    _add_compile(commands)
    _add_data(commands)
    _add_doctor(commands)
    _add_place(commands)
    _add_plan(commands)
    _add_simulate(commands)
    parser.commands = commands.choices
    return parser
