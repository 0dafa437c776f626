"""Service processes, which run next to the workers and belong to no generation.

``checkpoint_service`` writes and reads checkpoints, and reshards states when the ranks of a run change.
``compile_service`` compiles the programs for possible failures in advance.
"""
