"""Restores a checkpoint: chooses the newest intact copies, verifies their bytes against digests, and reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swift.checkpoint.array_files import read_arrays, read_part
from swift.checkpoint.arrays import CorruptFile, Verifier, unit_array
from swift.checkpoint.manifest import (
    ARRAYS,
    Copy,
    Ledger,
    Manifest,
    array_digest,
    check_shapes,
    checkpoint_path,
    committed_steps,
    read_manifest,
    write_manifest,
)
from swift.checkpoint.selection import TokenUpdateCounter, dynamic_k
from swift.checkpoint.units import StateSplit, Unit, shape_text
from swift.errors import SettingError

_SETTING = "checkpoint"

Share = Mapping[int, slice]
"""The expert ranks whose state a host holds, by stage."""


@dataclass(frozen=True)
class RestorePlan:
    """The copies that a restore reads.

    Attributes:
        manifest: manifest of the checkpoint whose dense part is restored.
        sources: the copy to read for every expert, from that iteration or an older one.
        passed_over: phrases that describe newer checkpoints and copies that were skipped because they are damaged.
    """

    manifest: Manifest
    sources: Mapping[Unit, Copy]
    passed_over: tuple[str, ...]

    @property
    def step(self) -> int:
        """The iteration that is restored."""
        return self.manifest.step

    @cached_property
    def tally(self) -> TokenUpdateCounter:
        """Counter of token updates after this restore, including the updates that it loses."""
        before = self.manifest.ledger.tally
        contained_LE = np.zeros_like(before.contained_LE)
        for unit, copy in self.sources.items():
            contained_LE[unit] = copy.contained
        return before.restored(contained_LE)

    def ledger(self, first_k: int, plt_budget: float | None) -> Ledger:
        """Returns the ledger of a run that continues from this restore.

        Args:
            first_k: K in the settings.
            plt_budget: see ``dynamic_k``. K does not change if nothing was lost, such as after a planned stop. If it is
                None, K is ``first_k``, regardless of its value before.
        """
        before = self.manifest.ledger
        copies = {  # a newer copy than the source is damaged
            unit: tuple(c for c in before.copies[unit] if c.step <= copy.step) for unit, copy in self.sources.items()
        }
        k = first_k
        if plt_budget is not None:
            k = max(first_k, before.k)
            if self.tally.num_lost > before.tally.num_lost:
                k = dynamic_k(k, self.tally.plt, plt_budget, max(before.num_classes, first_k))
        return replace(before, tally=self.tally, copies=copies, k=k)


def plan_restore(
    directory: Path,
    identity: Mapping[str, Any] | None = None,
    step: int | None = None,
    checker: Verifier | None = None,
) -> RestorePlan:
    """Finds the newest iteration that can be restored, and the newest intact copy of every expert up to it.

    Args:
        directory: directory of all checkpoints of a run.
        identity: settings that the run must share with the checkpoint; None to skip the check.
        step: iteration to restore; None for the newest that can be restored.
        checker: verifier to reuse, with the files that it has already checked; None for a new one.

    Raises:
        SettingError: there is no checkpoint, none can be restored, or it belongs to another model; the message says
            what is missing or damaged.
    """
    steps = committed_steps(directory) if step is None else [step]
    if not steps:
        raise SettingError(_SETTING, str(directory), "holds no checkpoint")
    checker, passed_over = checker or Verifier(directory), list[str]()
    for candidate in reversed(steps):
        path = checkpoint_path(directory, candidate)
        try:
            manifest = read_manifest(path, _SETTING)
        except SettingError as error:
            if step is not None:
                raise
            passed_over.append(f"{path.name} {error.allowed}")
            continue
        _check_identity(path, manifest, identity)
        try:
            _check_dense(manifest, checker)
            sources, damaged = _choose_sources(manifest, checker)
        except CorruptFile as error:
            passed_over.append(str(error))
            continue
        return RestorePlan(manifest, sources, (*passed_over, *damaged))
    raise SettingError(_SETTING, str(directory), f"cannot be restored: {'; '.join(passed_over)}")


def load_plan(directory: Path, plan: RestorePlan, split: StateSplit) -> Any:
    """Reads the whole state that a plan restores, and verifies the values.

    Args:
        directory: directory of all checkpoints of the run.
        plan: plan for this directory.
        split: division of the state.

    Returns:
        The state on the host.

    Raises:
        SettingError: the arrays belong to another model, or have changed since the plan was made.
    """
    _check_shapes(directory, plan.manifest, split)
    blocks = _read_experts(directory, plan, split)
    return split.join(_read_dense(directory, plan, split), blocks)


def load_share(directory: Path, plan: RestorePlan, split: StateSplit, share: Share) -> Any:
    """Reads one host's part of the state that a plan restores, and no other values.

    Args:
        directory: directory of all checkpoints of the run.
        plan: plan for this directory; its files must have just been verified on some host, since partial reads are not
            verified.
        split: division of the state.
        share: expert ranks whose state this host holds, by stage.

    Returns:
        The state on the host, in its full shape, with zeros outside ``share``.

    Raises:
        SettingError: the arrays belong to another model, or have changed since the plan was made.
    """
    _check_shapes(directory, plan.manifest, split)
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in split.shapes.items()}
    try:
        path = checkpoint_path(directory, plan.step) / ARRAYS
        for name in split.dense_shapes if share else ():
            for stage, ranks in share.items() if arrays[name].size else ():
                place = (slice(stage, stage + 1), *((slice(None), ranks) if name in split.ranked_names else ()))
                arrays[name][place] = read_part(path, name, place)
        for (layer, class_), copy in plan.sources.items():
            path, (stage, row) = checkpoint_path(directory, copy.step) / ARRAYS, split.location(layer)
            for dtype, names in split.names_of_type.items() if stage in share else ():
                unit_values = read_part(path, unit_array((layer, class_), dtype), (slice(None), share[stage]))
                for name, values in zip(names, unit_values, strict=True):
                    arrays[name][stage, row, share[stage], class_] = values
    except (OSError, ValueError) as error:
        raise SettingError(_SETTING, str(path.parent), f"has changed while it was read ({error}): try again") from error
    return jax.tree.unflatten(jax.tree.structure(split.abstract), arrays.values())


def record_restore(directory: Path, manifest: Manifest, ledger: Ledger) -> None:
    """Stores the ledger after a restore in the manifest, so that another fault does not count the same loss again."""
    write_manifest(checkpoint_path(directory, manifest.step), replace(manifest, ledger=ledger))


def _check_identity(path: Path, manifest: Manifest, identity: Mapping[str, Any] | None) -> None:
    for name, expected in (identity or {}).items():
        stored = manifest.identity.get(name)
        if stored != expected:
            raise SettingError(_SETTING, str(path), f"is of another model: its {name} is {stored!r}, here {expected!r}")


def _check_shapes(directory: Path, manifest: Manifest, split: StateSplit) -> None:
    expected_shapes = {name: shape_text(leaf) for name, leaf in split.dense_shapes.items()}
    expected_shapes |= {f"experts of {dtype}": shape_text(leaf) for dtype, leaf in split.unit_shapes.items()}
    expected_shapes["experts"] = str([split.num_layers, split.num_classes])
    stored_shapes = dict(manifest.dense.shapes)
    stored_shapes |= {f"experts of {dtype}": text for dtype, text in manifest.unit_shapes.items()}
    stored_shapes["experts"] = str([*manifest.ledger.tally.contained_LE.shape])
    check_shapes(checkpoint_path(directory, manifest.step), _SETTING, stored_shapes, expected_shapes)


def _check_dense(manifest: Manifest, checker: Verifier) -> None:
    reason = checker.dense(manifest)
    if reason:
        raise CorruptFile(reason)


def _choose_sources(manifest: Manifest, checker: Verifier) -> tuple[dict[Unit, Copy], list[str]]:
    """Returns (every expert's newest intact copy, descriptions of damaged newer copies)."""
    sources, damaged = dict[Unit, Copy](), list[str]()
    for (layer, class_), copies in manifest.ledger.copies.items():
        name = f"expert {class_} of layer {layer}"
        for copy in copies:
            reason = checker.copy(manifest, (layer, class_), copy)
            if reason is None:
                sources[layer, class_] = copy
                break
            damaged.append(f"{name}: {reason}")
        else:
            which = checkpoint_path(Path(), manifest.step)
            raise CorruptFile(f"{which} has no sound copy of {name}: {'; '.join(damaged[-len(copies) :])}")
    return sources, damaged


def _read_experts(directory: Path, plan: RestorePlan, split: StateSplit) -> dict[str, np.ndarray]:
    """Reads and verifies the blocks of all experts, one checkpoint at a time."""
    blocks = split.new_blocks(split.num_classes)
    for step in sorted({copy.step for copy in plan.sources.values()}):
        path = checkpoint_path(directory, step)
        units = {unit: copy for unit, copy in plan.sources.items() if copy.step == step}
        like = {unit_array(unit, dtype): shape for unit in units for dtype, shape in split.unit_shapes.items()}
        arrays = read_arrays(path / ARRAYS, like)
        for unit, copy in units.items():
            unit_arrays = [arrays.pop(unit_array(unit, dtype)) for dtype in split.unit_shapes]
            _check_read(path, "expert {1} of layer {0}".format(*unit), unit_arrays, copy.content)
            for dtype, array in zip(split.unit_shapes, unit_arrays, strict=True):
                blocks[dtype][unit] = array
    return blocks


def _read_dense(directory: Path, plan: RestorePlan, split: StateSplit) -> dict[str, np.ndarray]:
    path = checkpoint_path(directory, plan.step)
    filled = {name: leaf for name, leaf in split.dense_shapes.items() if leaf.size}
    arrays = read_arrays(path / ARRAYS, filled)
    for name, leaf in split.dense_shapes.items():
        array = arrays.setdefault(name, np.empty(leaf.shape, leaf.dtype))
        _check_read(path, name, [array], plan.manifest.dense.contents[name])
    return arrays


def _check_read(path: Path, name: str, arrays: list[np.ndarray], content: str) -> None:
    """Raises SettingError if the arrays as read differ from the saved ones, although their files were verified."""
    if array_digest(arrays) != content:
        allowed = f"the values of {name} are not those that were saved, though its files are: try again"
        raise SettingError(_SETTING, str(path), allowed)
