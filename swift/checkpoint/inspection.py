"""Describes checkpoints and restores as lines for users and fields of events, and finds damage. Read-only."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from swift.checkpoint.arrays import Verifier, is_model_array, is_persisted, unit_array
from swift.checkpoint.manifest import Copy, Ledger, Manifest, checkpoint_path, committed_steps, read_manifest
from swift.checkpoint.reader import RestorePlan, plan_restore
from swift.checkpoint.units import Unit
from swift.errors import SettingError

_SETTING = "DIR"


def source_lines(plan: RestorePlan) -> list[str]:
    """Formats a line for each source of a restore, and for each copy that was skipped.

    For example ``dense: storage, step 40`` and ``experts 3, 7 of layer 1: storage, step 20``.
    """
    lines = [f"dense: storage, step {plan.step}"]
    steps = sorted({copy.step for copy in plan.sources.values()}, reverse=True)
    for step in steps:
        units = [unit for unit, copy in plan.sources.items() if copy.step == step]
        lines.append(f"{_experts_text(units) if len(steps) > 1 else 'all experts'}: storage, step {step}")
    return [*lines, *(f"passed over: {reason}" for reason in plan.passed_over)]


def restore_lines(plan: RestorePlan, after: Ledger) -> list[str]:
    """Formats lines with a restore's sources, the proportion of lost tokens so far, and K if it changes.

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


def _experts_text(units: Iterable[Unit]) -> str:
    """Lists experts, such as ``experts 3, 7 of layer 1, expert 0 of layer 2``."""
    parts = []
    for layer, layer_units in groupby(sorted(units), key=lambda unit: unit[0]):
        classes = [str(class_) for _, class_ in layer_units]
        parts.append(f"expert{'s' * (len(classes) > 1)} {', '.join(classes)} of layer {layer}")
    return ", ".join(parts)


def save_facts(manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of the event ``checkpoint`` in ``events.jsonl``; ``bytes`` is the sum over all ranks."""
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
    """Returns the fields of the event ``restore`` in ``events.jsonl``; experts ``[layer, class]`` are listed by step.

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


def find_checkpoints(path: Path) -> tuple[Path, int | None]:
    """Finds the checkpoints at a path, which may be a run, its directory of checkpoints, or a single checkpoint.

    Returns:
        (directory of all checkpoints, iteration of a single checkpoint or None).

    Raises:
        SettingError: there are no checkpoints.
    """
    for directory in (path / "checkpoints", path):
        if committed_steps(directory):
            return directory, None
    number = path.name.rpartition("-")[2]
    if path.is_dir() and number.isdigit() and int(number) in committed_steps(path.parent):
        return path.parent, int(number)
    raise SettingError(_SETTING, str(path), "holds no checkpoint")


def overview(directory: Path) -> list[dict[str, Any]]:
    """Returns a row for every checkpoint, oldest first; the row of an unreadable checkpoint gives the reason."""
    rows = []
    for step, manifest in _manifests(directory, committed_steps(directory)):
        facts = {"error": manifest} if isinstance(manifest, str) else _facts(manifest)
        rows.append({"step": step, "path": str(checkpoint_path(directory, step))} | facts)
    return rows


def coverage(manifest: Manifest) -> list[dict[str, Any]]:
    """Returns a row for every expert, with its newest copy's step and files, and the step of its fallback copy."""
    contained_LE = manifest.ledger.tally.contained_LE
    rows = []
    for unit, copies in sorted(manifest.ledger.copies.items()):
        newest, *older = copies
        rows.append(
            {
                "layer": unit[0],
                "class": unit[1],
                "step": newest.step,
                "age": manifest.step - newest.step,
                "updates_unsaved": int(contained_LE[unit]) - newest.contained,
                "bytes": newest.num_bytes,
                "hash": newest.content,
                "files": sorted(newest.files),
                "fallback": older[0].step if older else None,
            }
        )
    return rows


def describe_restore(
    directory: Path, step: int | None = None, checker: Verifier | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Describes the restore of an iteration, by default the newest intact one, as (lines for users, JSON fields)."""
    try:
        plan = plan_restore(directory, step=step, checker=checker)
    except SettingError as error:
        return [f"nothing can be restored: {error.allowed}"], {"error": error.allowed}
    after = plan.ledger(plan.manifest.ledger.k, None)
    return restore_lines(plan, after), {"step": plan.step} | restore_facts(plan, after)


def find_damage(directory: Path, step: int | None, checker: Verifier) -> Iterator[str]:
    """Yields a phrase for each damaged file or value that any checkpoint needs, or the one of iteration ``step``."""
    shown = dict[str, None]()
    for manifest_step, manifest in _manifests(directory, committed_steps(directory) if step is None else [step]):
        if isinstance(manifest, str):
            damages = [f"{checkpoint_path(directory, manifest_step).name} {manifest}"]
        else:
            damages = list(_damages_of(manifest, checker))
        # A running training may have removed an old checkpoint meanwhile: its files are missing, but not damaged.
        if damages and step is None and _is_removed(directory, manifest_step):
            continue
        shown |= dict.fromkeys(damages)
    yield from shown


def _is_removed(directory: Path, step: int) -> bool:
    """Whether a run has removed a checkpoint in the meantime; runs remove the manifest before the files."""
    return step not in committed_steps(directory)


def _damages_of(manifest: Manifest, checker: Verifier) -> Iterator[str]:
    """Yields the damage to the files that one checkpoint needs, then the damage to the values in intact files."""
    for owner, files in sorted(manifest.files_needed().items()):
        for name, digest in files.items():
            yield from filter(None, [checker.file(owner, name, digest)])
    reason = checker.dense(manifest)
    if reason:
        yield reason
    else:
        for name, shape in manifest.dense.shapes.items():
            if is_persisted(shape) and is_model_array(name):
                yield from filter(None, [checker.finite(manifest.step, name)])
    for unit, copies in sorted(manifest.ledger.copies.items()):
        for copy in copies:
            reason = checker.copy(manifest, unit, copy)
            if reason:
                yield reason
            else:
                names = [unit_array(unit, dtype) for dtype in manifest.unit_shapes]
                yield from filter(None, [checker.finite(copy.step, name) for name in names])


def _manifests(directory: Path, steps: Iterable[int]) -> Iterator[tuple[int, Manifest | str]]:
    """Yields each step with its manifest, or with the reason why it cannot be read."""
    for step in steps:
        try:
            manifest: Manifest | str = read_manifest(checkpoint_path(directory, step), _SETTING)
        except SettingError as error:
            manifest = error.allowed
        yield step, manifest


def _facts(manifest: Manifest) -> dict[str, Any]:
    ledger = manifest.ledger
    steps = [copies[0].step for copies in ledger.copies.values()]
    return {
        "bytes": manifest.num_bytes,
        "bytes_per_rank": manifest.bytes_per_rank,
        "is_full": manifest.is_full,
        "experts_per_layer": ledger.num_classes if manifest.is_full else ledger.k,
        "oldest_expert": min(steps, default=manifest.step),
        "plt": ledger.tally.plt,
        "faults": ledger.tally.num_faults,
        "validation_loss": manifest.validation_loss,
    }
