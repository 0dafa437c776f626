"""Strategies that a simulation compares: re-routing (Swift, ReCycle), restarts, Oobleck, Varuna, Bamboo, an ideal.

``strategy`` defines the interface, ``registry`` lists all of them by name, and ``published`` holds published figures.
"""
