"""``swift launch``: the job that its options describe, the machines of a run, and the command itself."""

from swift.cli.launch.command import launch
from swift.cli.launch.nodes import Nodes, ProcessCommands

__all__ = ["Nodes", "ProcessCommands", "launch"]
