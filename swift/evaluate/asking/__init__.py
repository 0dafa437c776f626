"""Questions put to a generation engine.

``likelihood`` makes the tokens of texts that follow others, and ``asking`` puts the questions of a task file, many at
once.
"""
