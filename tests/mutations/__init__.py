"""Mistakes that the quick tests find: one line of the package is made wrong, and the tests named have to fail.

    python -m tests.mutations                 # all of them, one after the other
    python -m tests.mutations routing split   # those of files with such names

A copy of the package is changed, never the package itself. A mutation that survives is a hole in the tests.
"""

from tests.mutations import checkpoint, elastic, experts, models, pipeline, schedules

MUTATIONS = tuple(
    mutation for room in (models, experts, pipeline, schedules, checkpoint, elastic) for mutation in room.MUTATIONS
)
