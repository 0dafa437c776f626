"""``swift launch``: the run that it is asked for, the machines that it runs on, and the course of the command."""

from swift.cli.launch.command import launch
from swift.cli.launch.nodes import Nodes, ProcessCommands

__all__ = ["Nodes", "ProcessCommands", "launch"]
