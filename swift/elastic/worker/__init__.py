"""A worker process of a run.

``control_channel`` connects it to the supervisor, ``worker`` takes it from one generation to the next, with
``kept_states``, and ``generation_run`` runs the iterations of each, which are those of ``swift.train.TrainLoop``.
"""
