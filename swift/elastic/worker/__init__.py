"""A worker process of a run.

``channel`` connects it to the supervisor, ``worker`` takes it from one generation to the next, with
``generation``, and ``generation`` runs the iterations of each, which are those of ``swift.train.TrainLoop``.
"""
