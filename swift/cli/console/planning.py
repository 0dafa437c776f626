"""Options of the commands that compile for pods, plan and simulate; what they import is loaded when they run."""

from typing import Any

from swift.cli.console.parser import path_of


def add_compile(commands: Any) -> None:
    """Adds ``swift compile``, and the process that it starts for each configuration."""
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


def add_place(commands: Any) -> None:
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


def add_plan(commands: Any) -> None:
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
        help="what the survivors do: reroute (nothing moves), roles (workers take failed ones' places), recut "
        "(pipelines of unequal length, cut anew), or auto, the best of them (without a MODE)",
    )
    plan.add_argument(
        "--outage", default="", metavar="DURATION", help="time until the workers return, for auto (default: endless)"
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


def add_simulate(commands: Any) -> None:
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
        "--removals", type=int, metavar="N", help="number of these failures (default: half of the workers)"
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
