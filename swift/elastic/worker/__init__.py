"""A worker process of a run."""
