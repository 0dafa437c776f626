"""``swift launch``: the job that its options describe, the machines of a run, and the command itself."""
