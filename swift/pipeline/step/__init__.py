"""The step functions of a training run.

``spec`` describes a step and lays out its state. ``stage`` runs the blocks of a chunk as F, B and W, and ``stage_ops``
adds embedding, loss and buffers. ``tick_arrays`` turns the schedule into arguments, ``interpreter`` runs its ticks, and
``update`` is U, layer by layer with ``offload``. ``train_step`` joins these into the programs of a pipeline,
``single_worker`` into the programs of one worker. ``metrics`` defines their results; ``costs`` estimates F, B and W for
the planner.
"""
