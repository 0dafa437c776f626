"""A worker process of an elastic run, which trains as the supervisor commands.

``channel`` has the pipes to and from the supervisor. ``worker`` takes the process from one generation to the next.
``generation`` trains within a generation, with ``swift.train.loop.TrainLoop``, and has the programs and states for it.
"""
