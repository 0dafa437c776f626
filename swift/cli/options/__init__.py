"""Values of the command line: checked types, named numbers and workers, gin files, and errors that explain mistakes."""

from swift.cli.options.adapting import adapted, adapted_lines, check_adapt
from swift.cli.options.cuts import BlockOptions, microbatches_of
from swift.cli.options.deadlines import OF_ONE, OF_PROCESSES, deadlines_of
from swift.cli.options.gin_files import all_installed, gin_texts
from swift.cli.options.kinds import Written, checked, described, fitting
from swift.cli.options.mistakes import Source, build_mistake, nearest, parse_mistake, translated
from swift.cli.options.named import costs_of, named_numbers, seconds_of, workers_of
from swift.cli.options.nodes import listening_address, node_count, own_node
from swift.cli.options.outputs import PAGE, PICTURE, PLACEMENT, PLAN, RESULTS, OutputKind, check_output

__all__ = [
    "OF_ONE",
    "OF_PROCESSES",
    "PAGE",
    "PICTURE",
    "PLACEMENT",
    "PLAN",
    "RESULTS",
    "BlockOptions",
    "OutputKind",
    "Source",
    "Written",
    "adapted",
    "adapted_lines",
    "all_installed",
    "build_mistake",
    "check_adapt",
    "check_output",
    "checked",
    "costs_of",
    "deadlines_of",
    "described",
    "fitting",
    "gin_texts",
    "listening_address",
    "microbatches_of",
    "named_numbers",
    "nearest",
    "node_count",
    "own_node",
    "parse_mistake",
    "seconds_of",
    "translated",
    "workers_of",
]
