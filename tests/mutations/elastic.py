"""Mistakes in the membership of runs of real processes."""

from tests.mutations.mutation import Mutation

FAILURES = (
    "tests/elastic/membership/test_shared_failures.py",
    "tests/elastic/membership/test_restart_limits.py",
)
STOPPING = ("tests/elastic/membership/test_stopping.py",)
BLOCK_MOVES = ("tests/elastic/membership/test_block_moves.py",)
LOADING, ABORT = ("tests/elastic/worker/test_loading_ahead.py",), ("tests/elastic/worker/test_abort.py",)

MUTATIONS = (
    Mutation(
        "elastic/membership/state_machine.py", "        if other_deaths:\n", "        if not other_deaths:\n", FAILURES
    ),
    Mutation(
        "elastic/membership/state_machine.py", "len(stalled) < _MAX_STALLS", "len(stalled) > _MAX_STALLS", FAILURES
    ),
    Mutation(
        "elastic/membership/failure_detector.py", "generation.linked >= set(", "generation.linked > set(", FAILURES
    ),
    Mutation(
        "elastic/membership/status.py",
        "if self.is_stopping and self.generation is not None:",
        "if self.generation is None:",
        STOPPING,
    ),
    Mutation(
        "elastic/membership/state_machine.py",
        "is_loaded = live.loaded >= set(",
        "is_loaded = set() <= set(",
        BLOCK_MOVES,
    ),
    Mutation("elastic/worker/generation.py", "if loading[0] == cut else None", "if loading[0] else None", LOADING),
    Mutation("elastic/worker/generation.py", "self._live[0] == command.number", "self._live[0] > 0", LOADING),
    Mutation("elastic/worker/worker.py", "if is_broken and command", "if not is_broken and command", ABORT),
    Mutation(
        "pipeline/reconfigure/configuration.py",
        "return replace(self, device_rows=",
        "return self if row_of else replace(self, device_rows=",
        ("tests/pipeline/test_recut.py",),
    ),
    Mutation(
        "schedules/plans/normalize.py",
        "{self.place(worker) for worker in workers}",
        "set(workers)",
        ("tests/elastic/membership/test_recovery_of_cut_pipelines.py",),
    ),
    Mutation(
        "pipeline/reconfigure/recut.py",
        "MeshRow.at(worker, holders.place(worker))",
        "MeshRow.at(worker, worker)",
        ("tests/pipeline/test_block_sharing.py",),
    ),
    Mutation(
        "train/loop.py",
        "surviving_roles = {row.role",
        "surviving_roles = {row.worker",
        ("tests/train/test_window_rules.py",),
    ),
    Mutation(
        "schedules/plans/normalize.py",
        "(problem.failed | moved_workers) - assigned_roles",
        "(problem.failed - assigned_roles) | moved_workers",
        ("tests/pipeline/test_recut.py",),
    ),
)
