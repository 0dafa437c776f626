"""Training steps of a pipeline, under any schedule and failure set.

``split_backward`` divides a stage's backward pass into input and weight gradients, ``step`` builds the compiled step
from tick table to update, and ``reconfigure`` replaces plan, program and state when workers fail or return. ``state``
defines the training state and a stage's weights; ``scopes`` defines the name scopes of instructions.
"""
