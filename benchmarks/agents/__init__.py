"""A town of agents whose steps are prompts, and the order in which they are taken.

``town`` is what agents do, ``order`` says whose step may be next, ``simulation`` runs them on an engine whose calls
were measured, and ``asking`` on the engine itself. As in AI Metropolis (arXiv 2411.03519): an agent may be steps ahead
of those that cannot reach it.
"""
