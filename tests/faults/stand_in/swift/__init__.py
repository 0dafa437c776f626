"""Stands in for Swift where the campaign itself is tested: what can be seen of a run, without JAX."""
