"""Mistakes in partial checkpoints, snapshots and the directory of checkpoints."""

from tests.mutations.mutation import Mutation

PLT = (
    "tests/checkpoint/test_lost_tokens.py",
    "swift/checkpoint/selection.py",
    "swift/checkpoint/selection.py",
)
BUDDIES = ("tests/checkpoint/test_peer_snapshots.py",)
DAMAGE = tuple(f"tests/checkpoint/test_{name}.py" for name in ("damage", "broken_off_saves", "arrays"))

MUTATIONS = (
    Mutation(
        "checkpoint/selection.py",
        "np.lexsort((saved_at_LE, -unsaved_LE), axis=-1)",
        "np.lexsort((saved_at_LE, unsaved_LE), axis=-1)",
        PLT,
    ),
    Mutation(
        "checkpoint/selection.py",
        "return (turn_L + k) % max",
        "return (turn_L + 1) % max",
        (*PLT, "tests/checkpoint/test_partial.py"),
    ),
    Mutation("checkpoint/selection.py", "popularity_LE - dropped_LE,", "popularity_LE,", PLT),
    Mutation("checkpoint/selection.py", "plt <= budget else", "plt >= budget else", PLT),
    Mutation("checkpoint/peer_snapshots.py", "self.step_CLE.argmin(axis=0)", "self.step_CLE.argmax(axis=0)", BUDDIES),
    Mutation("checkpoint/peer_snapshots.py", "(rank + 1) % num_ranks", "rank", BUDDIES),
    Mutation(
        "checkpoint/manifest.py",
        "if step not in kept_steps:",
        "if False:",
        ("tests/checkpoint/test_partial.py", *DAMAGE),
    ),
    Mutation(
        "checkpoint/manifest.py",
        "if newer > step:",
        "if newer >= step:",
        ("tests/checkpoint", "tests/elastic/services/test_checkpoint_service_trouble.py"),
    ),
)
