"""Elastic training: one process per worker or expert rank, any of which may die and be restarted during the run.

A *generation* is a fixed set of processes that train together. When a process fails or rejoins, the run forms the next
generation. ``membership`` decides who is in it and how the run recovers; ``coordinator`` carries out those decisions;
``worker`` trains; ``services`` write checkpoints and compile programs in advance; ``transport`` starts processes and
carries messages within and between nodes; ``state`` is what outlives a process; ``reporting`` records what happens.

The package itself contains the JAX process groups: ``jax_group``, ``accelerators`` for groups on GPUs or TPU chips, and
``device_probe``, which detects the devices of a machine.
"""
