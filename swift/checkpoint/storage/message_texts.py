"""Texts and event fields that describe checkpoints and restores."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from swift.checkpoint.partial.expert_units import Unit
from swift.checkpoint.storage.manifest import Copy, Ledger, Manifest
from swift.checkpoint.storage.reader import RestorePlan


def source_lines(plan: RestorePlan) -> list[str]:
    """A line for each source of a restore, and for each copy passed over.

    Such as ``dense: storage, step 40`` and ``experts 3, 7 of layer 1: storage, step 20``.
    """
    lines = [f"dense: storage, step {plan.step}"]
    steps = sorted({copy.step for copy in plan.sources.values()}, reverse=True)
    for step in steps:
        units = [unit for unit, copy in plan.sources.items() if copy.step == step]
        lines.append(f"{experts_text(units) if len(steps) > 1 else 'all experts'}: storage, step {step}")
    return [*lines, *(f"passed over: {why}" for why in plan.passed_over)]


def restore_lines(plan: RestorePlan, after: Ledger) -> list[str]:
    """The sources of a restore, lost tokens so far, and K where it changes.

    Args:
        plan: plan of the restore.
        after: ledger with which the run continues.
    """
    share = f"{plan.tally.plt:.4f}"
    if plan.tally.num_uncounted:
        share = f"at most {share} (iterations without a record: {plan.tally.num_uncounted})"
    lines = [*source_lines(plan), f"proportion of lost tokens so far: {share}"]
    before = plan.manifest.ledger.k
    return lines + [f"K is now {after.k} experts of a layer, and was {before}"] * (after.k != before)


def experts_text(units: Iterable[Unit]) -> str:
    """A list of experts, such as ``experts 3, 7 of layer 1, expert 0 of layer 2``."""
    parts = []
    for layer, of_layer in groupby(sorted(units), key=lambda unit: unit[0]):
        classes = [str(class_) for _, class_ in of_layer]
        parts.append(f"expert{'s' * (len(classes) > 1)} {', '.join(classes)} of layer {layer}")
    return ", ".join(parts)


def save_facts(manifest: Manifest) -> dict[str, Any]:
    """Fields of the event ``checkpoint`` in ``events.jsonl``; bytes are those of the values, of all ranks together."""
    ledger = manifest.ledger
    uncounted = ledger.tally.num_uncounted
    return {
        "bytes": manifest.num_bytes,
        "experts_per_layer": ledger.num_classes if manifest.is_full else ledger.k,
        "experts": "all" if manifest.is_full else manifest.chosen,
        "plt": ledger.tally.plt,
        **({"iterations_uncounted": uncounted} if uncounted else {}),
    }


def restore_facts(plan: RestorePlan, after: Ledger) -> dict[str, Any]:
    """Fields of the event ``restore`` in ``events.jsonl``; experts are ``[layer, class]``, by the step of their copy.

    Args:
        plan: plan of the restore.
        after: ledger with which the run continues.
    """
    return {
        "dense": plan.step,
        "experts": _by_step(plan.sources),
        "passed_over": list(plan.passed_over),
        "plt": plan.tally.plt,
        "faults": plan.tally.num_faults,
        "experts_per_layer": after.k,
        "experts_per_layer_before": plan.manifest.ledger.k,
        "updates_lost": (plan.tally.lost_L - plan.manifest.ledger.tally.lost_L).tolist(),
    }


def _by_step(sources: Mapping[Unit, Copy]) -> dict[str, Any]:
    steps = sorted({copy.step for copy in sources.values()}, reverse=True)
    if len(steps) == 1:
        return {str(steps[0]): "all"}
    return {str(step): [list(unit) for unit, copy in sources.items() if copy.step == step] for step in steps}
