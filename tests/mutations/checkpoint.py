"""Mistakes in partial checkpoints, snapshots and the directory of checkpoints."""

from tests.mutations.mutation import Mutation

PLT = (
    "tests/checkpoint/test_lost_tokens.py",
    "swift/checkpoint/partial/selection.py",
    "swift/checkpoint/partial/lost_tokens.py",
)
BUDDIES = ("tests/checkpoint/test_peer_snapshots.py",)
DAMAGE = tuple(f"tests/checkpoint/test_{name}.py" for name in ("damage", "broken_off_saves", "arrays"))

MUTATIONS = (
    Mutation(
        "checkpoint/partial/selection.py",
        "np.lexsort((saved_at_LE, -unsaved_LE), axis=-1)",
        "np.lexsort((saved_at_LE, unsaved_LE), axis=-1)",
        PLT,
    ),
    Mutation(
        "checkpoint/partial/selection.py",
        "return (turn_L + k) % max",
        "return (turn_L + 1) % max",
        (*PLT, "tests/checkpoint/test_partial.py"),
    ),
    Mutation("checkpoint/partial/lost_tokens.py", "popularity_LE - dropped_LE,", "popularity_LE,", PLT),
    Mutation("checkpoint/partial/lost_tokens.py", "plt <= budget else", "plt >= budget else", PLT),
    Mutation(
        "checkpoint/memory/peer_snapshots.py", "self.step_CLE.argmin(axis=0)", "self.step_CLE.argmax(axis=0)", BUDDIES
    ),
    Mutation("checkpoint/memory/peer_snapshots.py", "(rank + 1) % num_ranks", "rank", BUDDIES),
    Mutation(
        "checkpoint/storage/directory.py",
        "for step in steps[:-num_kept]:",
        "for step in steps[:0]:",
        ("tests/checkpoint/test_partial.py", *DAMAGE),
    ),
    Mutation(
        "checkpoint/storage/directory.py",
        "if newer > step:",
        "if newer >= step:",
        ("tests/checkpoint", "tests/elastic/services/test_checkpoint_service_trouble.py"),
    ),
)
