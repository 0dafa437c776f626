"""``swift place``: places experts on ranks by load; prints text or JSON, writes an array, draws a picture."""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swift.cli.values import PICTURE, PLACEMENT, check_output
from swift.errors import SettingError, check_count, renamed_errors, suggest
from swift.experts.placement.library import check_loads, place_experts, rank_loads
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import PlacementPolicy, Static
from swift.experts.placement.symi import Symi
from swift.files import read_regular, replace_file

_KNOWN: tuple[PlacementPolicy, ...] = (Packed(), MinMax(), Symi(), Static())
_POLICIES = {policy.name: policy for policy in _KNOWN}
_COLUMNS = {"before": "static", "after": "", "split": "best split"}
"""Maps each load that is shown to its column heading; the policy's name replaces the empty heading."""
_MOST_SLOTS = 1 << 20
_SETTINGS = {"ExpertConfig.slots_per_rank": "--slots", "loads": "LOADS.npy"}


def place(options: argparse.Namespace) -> None:
    """Runs ``swift place LOADS.npy``, for example with ``--ranks 64 --slots 6``."""
    for name in ("ranks", "slots"):
        check_count(f"--{name}", getattr(options, name), least=1)
    if options.ranks * options.slots > _MOST_SLOTS:
        raise SettingError("--slots", options.slots, f"makes more than {_MOST_SLOTS:,} slots with --ranks")
    if options.policy not in _POLICIES:
        known = f"must be one of {', '.join(_POLICIES)}"
        raise SettingError("--policy", options.policy, suggest(options.policy, _POLICIES, known))
    for option, path, endings, kind in (
        ("--plot", options.plot, (".svg", ".png"), PICTURE),
        ("--out", options.out, (".npy",), PLACEMENT),
    ):
        if path is not None and path.suffix.lower() not in endings:
            raise SettingError(option, str(path), f"must end in {' or '.join(endings)}")
        if path is not None:
            check_output(option, path, kind, inputs=[options.loads])
    with renamed_errors(_as_written):
        loads_LE = _read(options.loads)
        placements = {
            name: place_experts(loads_LE, options.ranks, options.slots, policy)
            for name, policy in (("before", Static()), ("after", _POLICIES[options.policy]))
        }
    loads = {name: rank_loads(loads_LE, slots, evenly=True) for name, slots in placements.items()}
    loads["split"] = rank_loads(loads_LE, placements["after"])
    if options.out is not None:
        file = io.BytesIO()
        np.save(file, placements["after"])
        _write("--out", options.out, file.getvalue())
    if options.plot is not None:
        # Matplotlib is imported only if there is a picture to draw.
        from swift.draw.loads import rank_loads_file

        labels = {name: label or options.policy for name, label in _COLUMNS.items()}
        labelled = {labels[name]: loads[name] for name in labels}
        picture = rank_loads_file(labelled, "png" if options.plot.suffix.lower() == ".png" else "svg")
        _write("--plot", options.plot, picture)
    show = _json if options.format == "json" else _table
    print("\n".join(show(options, loads_LE, placements["after"], loads)))


def _as_written(error: SettingError) -> SettingError:
    return SettingError(_SETTINGS.get(error.setting, error.setting), error.value, error.allowed)


def _read(path: Path) -> np.ndarray:
    try:
        return check_loads(np.lib.format.read_array(io.BytesIO(read_regular(path)), allow_pickle=False))
    except Exception as error:  # NumPy raises many types: a header may be invalid, or claim more than the memory
        if isinstance(error, SettingError):
            raise SettingError(error.setting, str(path), f"has {error.value}, and {error.allowed}") from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "is not an array in .npy format"
        raise SettingError("LOADS.npy", str(path), f"cannot be read: {reason}") from error


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        replace_file(path, content)
    except OSError as error:
        raise SettingError(option, str(path), f"cannot be written: {error.strerror}") from error


def _uneven(load_N: np.ndarray) -> float:
    """Returns the ratio of the largest load to the mean, or 1 if all loads are zero."""
    return float(load_N.max() / load_N.mean()) if load_N.any() else 1.0


def _table(
    options: argparse.Namespace, loads_LE: np.ndarray, placement_LNS: np.ndarray, loads: Mapping[str, np.ndarray]
) -> Iterator[str]:
    num_layers, num_classes = loads_LE.shape
    yield f"{num_classes} experts of {num_layers} layers in {options.ranks} ranks x {options.slots} slots"
    yield "largest load of a rank over their mean:"
    headings = [label or options.policy for label in _COLUMNS.values()]
    yield "  ".join(["layer", *(heading.rjust(10) for heading in headings), "replicas of an expert"])
    for layer in range(num_layers):
        cells = [f"{_uneven(loads[name][layer]):.4f}".rjust(10) for name in _COLUMNS]
        replicas_E = np.bincount(placement_LNS[layer].ravel(), minlength=num_classes)
        yield "  ".join([str(layer).rjust(5), *cells, f"{replicas_E.min()} to {replicas_E.max()}"])


def _json(
    options: argparse.Namespace, loads_LE: np.ndarray, placement_LNS: np.ndarray, loads: Mapping[str, np.ndarray]
) -> Iterator[str]:
    layers: list[dict[str, Any]] = []
    for layer in range(len(loads_LE)):
        load_facts = {
            name: {"largest_over_mean": _uneven(rank_loads[layer]), "rank_loads": rank_loads[layer].tolist()}
            for name, rank_loads in loads.items()
        }
        layers.append({"layer": layer, **load_facts, "placement": placement_LNS[layer].tolist()})
    facts = {"policy": options.policy, "num_ranks": options.ranks, "slots_per_rank": options.slots}
    yield json.dumps(facts | {"num_experts": loads_LE.shape[1], "layers": layers})
    sys.stdout.flush()
