"""Training by real processes, one for each worker or expert rank, that may die and return.

``membership`` decides which processes form each generation and how the run recovers; ``coordinator`` carries that out;
``worker`` trains; ``services`` write checkpoints and compile programs ahead; ``transport`` starts processes and carries
messages within and between nodes; ``state`` outlives processes; ``reporting`` records what happens.

The groups of processes that JAX forms are here: ``jax_group``, ``accelerators`` for groups that hold GPUs or TPU chips,
and ``device_probe``, which finds out what a machine has.
"""
