"""The command ``data``: the profile of a pipeline, the plan that is chosen for it, and how fast both are."""

from swift.cli.data.command import data

__all__ = ["data"]
