"""A worker process of a run.

``channel`` connects it to the supervisor, and ``worker`` takes it from one generation to the next. ``generation`` runs
the iterations of each, which are those of ``swift.train.loop.TrainLoop``, and has its programs and its states.
"""
