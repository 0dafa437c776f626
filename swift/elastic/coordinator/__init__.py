"""The coordinator of a run of processes."""
