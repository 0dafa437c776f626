"""Service processes, which run beside the workers and belong to no generation.

``checkpoint_service`` writes and reads checkpoints, and reshards states when the ranks of a run change.
``compile_service`` compiles the programs for possible failures and returns in advance.
"""
