"""Cuts of blocks into stages, the chunks of pipelines that are cut differently, and the stacks of both in arrays."""
