"""Service processes beside the workers.

The checkpoint service writes and reads checkpoints, and reshards states when the ranks of a run change; the compile
service compiles programs ahead of failures.
"""
