"""A run in one process, in which workers and expert ranks fail as its settings say.

``cluster`` has the live workers and their engine; ``run`` has them take part in ``TrainLoop``, and ``run_checkpoints``
keeps what the loop computes.
"""
