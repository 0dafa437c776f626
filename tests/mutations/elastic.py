"""Mistakes in the membership of runs of real processes."""

from tests.mutations.mutation import Mutation

FAILURES = (
    "tests/elastic/membership/test_shared_failures.py",
    "tests/elastic/membership/test_restart_limits.py",
)
MEMBERSHIP = ("tests/elastic/membership/test_state_machine.py",)

MUTATIONS = (
    Mutation("elastic/membership/lifecycle.py", "    if others:\n", "    if not others:\n", FAILURES),
    Mutation("elastic/membership/lifecycle.py", "len(stalled) < _MAX_STALLS", "len(stalled) > _MAX_STALLS", FAILURES),
    Mutation(
        "elastic/membership/failure_detector.py", "generation.linked >= set(", "generation.linked > set(", FAILURES
    ),
    Mutation(
        "elastic/membership/run_status.py",
        "if self.is_stopping and self.generation is not None:",
        "if self.generation is None:",
        MEMBERSHIP,
    ),
)
