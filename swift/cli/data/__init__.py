"""The command ``data``: the profile of a pipeline, the plan that is chosen for it, and how fast both are."""

from swift.cli.data.command import data
from swift.cli.data.serving import input_hosts_of_runs

__all__ = ["data", "input_hosts_of_runs"]
