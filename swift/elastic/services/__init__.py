"""Service processes beside the workers.

``checkpoint_service`` writes and reads checkpoints, and reshards states when the ranks of a run change;
``compile_service`` compiles programs ahead of failures.
"""
