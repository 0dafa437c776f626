"""Words for workers and expert ranks that fail and rejoin."""

from collections.abc import Collection, Mapping, Sequence

from swift.pipeline.reconfigure.engine import Reconfiguration
from swift.topology import Worker
from swift.train.settings.failure_list import StageRank


def changed_text(changed: Mapping[str, Sequence[str]]) -> str:
    """Formats which workers or ranks changed, by how.

    >>> changed_text({"failed": ["0:1", "1:1"], "rejoined": []})
    '0:1, 1:1 failed'
    """
    return " and ".join(f"{', '.join(names)} {how}" for how, names in changed.items() if names)


def cost_text(change: Reconfiguration) -> str:
    """Formats the time that a change took."""
    took = change.plan_ms + change.compile_ms + change.move_ms
    return f"{took:.0f} ms to reconfigure{'' if change.prepared else ', not prepared'}"


def worker_names(workers: Collection[Worker]) -> list[str]:
    """Names workers as settings do, in order."""
    return [f"{d}:{p}" for d, p in sorted(workers)]


def changed_names(before: frozenset[StageRank], lost: frozenset[StageRank]) -> dict[str, list[str]]:
    """Names the ranks that fail or rejoin."""
    return {"failed": rank_names(lost - before), "rejoined": rank_names(before - lost)}


def rank_names(ranks: Collection[StageRank]) -> list[str]:
    """Names expert ranks as settings do, in order."""
    return [f"0:{stage} rank {rank}" for stage, rank in sorted(ranks)]
