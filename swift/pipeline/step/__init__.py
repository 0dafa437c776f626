"""The step functions of a training run.

The spec of a step and its state, a stage's ops, the interpreter of tick tables, the update, and the step of a single
worker.
"""
