"""Compile report as text, and as one JSON document with these keys:

- ``topology``: name, devices, and figures of the chip; null if unknown.
- ``experiment``: topology, dtype and tokens of an iteration; ``jax``: its version.
- ``configurations``, one entry for each:

  - ``failed``, ``lost_ranks``, ``devices``: workers and ranks that are down, and the number of remaining devices.
  - ``program``, ``iterations``: ``window`` or ``single``, and the iterations of a call.
  - ``attention``: attention kernel; ``triton`` where a run on GPUs would use ``cudnn``, which only a GPU can trace.
  - ``result``: ``fits`` (also if the memory is unknown), ``too large``, or ``refused``, with a ``reason``.
  - ``memory`` of a device: ``needed_bytes`` with its parts, ``capacity_bytes``; ``host_..._bytes`` in host memory.
  - ``collectives``: for each kind ``runs`` and ``bytes`` of an iteration, over all devices.
  - ``exchange``, ``tokens``, and ``head`` and ``embedding`` if they are sharded: ``compiled_bytes`` and
    ``formula_bytes`` of an iteration; of the exchange also by group of parameters (``groups``).
  - ``flops``: FLOPs of an iteration over all devices; ``bubble_share``: bubbles of the plan.
  - ``predicted``: ``step_ms`` and its parts, ``flops_utilization``; null if the chip is unknown.
  - ``lower_s``, ``compile_s``: seconds of tracing and compiling.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from swift.config.experiment import Experiment
from swift.pod_compile.pods import Pod

_GIB = 2**30
_HEADINGS = ("configuration", "result", "GiB needed", "of", "GiB exchanged", "TFLOPs", "predicted ms", "compiled in s")
_PARTS = {
    "compute": "ops",
    "tokens": "tokens to experts and back",
    "messages": "messages between stages",
    "update": "update",
    "exchange": "weights and gradients on the wire",
    "other": "other collectives",
}
"""Descriptions of the parts of the predicted time."""


def document(experiment: Experiment, pod: Pod, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Builds the JSON document from the reports of ``compile_one`` on all configurations."""
    chip, topology = pod.chip, experiment.topology
    return {
        "topology": {
            "name": pod.name,
            "devices": pod.num_devices,
            "platform": chip.platform,
            "memory_bytes": chip.memory_bytes,
            "peak_flops": (chip.peak_flops or {}).get(experiment.compute_dtype),
            "memory_bandwidth": chip.memory_bandwidth,
            "link_bandwidth": chip.link_bandwidth,
            "network_bandwidth": chip.network_bandwidth,
        },
        "experiment": {
            "num_pipelines": topology.num_pipelines,
            "num_stages": topology.num_stages,
            "num_expert_ranks": topology.num_expert_ranks,
            "compute_dtype": experiment.compute_dtype,
            "tokens_per_step": experiment.tokens_per_step,
        },
        "jax": jax.__version__,
        "configurations": list(reports),
    }


def name_of(report: Mapping[str, Any]) -> str:
    """Returns a short name for a configuration, such as ``all live`` or ``1:2 down``."""
    if report["lost_ranks"]:
        return f"{len(report['lost_ranks'])} rank(s) lost"
    return f"{' '.join(report['failed'])} down" if report["failed"] else "all live"


def text_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Formats the JSON document as lines of text."""
    pod, experiment = facts["topology"], facts["experiment"]
    memory = f" of {pod['memory_bytes'] / _GIB:.2f} GiB" if pod["memory_bytes"] else ""
    yield (
        f"{pod['name']}: {pod['devices']} devices{memory}; {experiment['num_pipelines']} pipelines x "
        f"{experiment['num_stages']} stages x {experiment['num_expert_ranks']} expert ranks, "
        f"{experiment['tokens_per_step']:,} tokens per iteration; jax {facts['jax']}"
    )
    yield ""
    yield from _table([_HEADINGS, *(_row(report) for report in facts["configurations"])])
    whole = next((report for report in facts["configurations"] if "collectives" in report), None)
    if whole is not None:
        yield ""
        yield from _details(whole)
    for report in facts["configurations"]:
        if "reason" in report:
            yield ""
            yield f"{name_of(report)}: {report['reason']}"


def _row(report: Mapping[str, Any]) -> tuple[str, ...]:
    memory, predicted = report.get("memory", {}), report.get("predicted")
    exchanged = sum(kind["bytes"] for kind in report["collectives"].values()) if "collectives" in report else None
    return (
        name_of(report),
        report["result"],
        _gib(memory.get("needed_bytes")),
        _gib(memory.get("capacity_bytes")),
        _gib(exchanged),
        f"{report['flops'] / 1e12:.3g}" if "flops" in report else "-",
        f"{predicted['step_ms']:.4g}" if predicted else "-",
        f"{report['compile_s']:.1f}",
    )


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _GIB:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *padded))


def _details(report: Mapping[str, Any]) -> Iterator[str]:
    if host := sum(num_bytes for name, num_bytes in report["memory"].items() if name.startswith("host_")):
        yield f"{name_of(report)}: {host / _GIB:.3g} GiB of its host's memory for each device"
    yield f"{name_of(report)}, in one iteration, all devices together:"
    for kind, counts in report["collectives"].items():
        yield f"  {kind:<20}{counts['runs']:>9,.4g} runs {counts['bytes'] / 1e6:>14,.3f} MB"
    yield "exchange of weights and gradients, MB compiled beside 2 * slots * ranks * W * bytes:"
    exchange = report["exchange"]
    for name, group in (*exchange["groups"].items(), ("all", exchange)):
        yield f"  {name:<20}{group['compiled_bytes'] / 1e6:>14,.3f} {group['formula_bytes'] / 1e6:>14,.3f}"
    tokens = report["tokens"]
    formula = f" {tokens['formula_bytes'] / 1e6:>14,.3f}" if "formula_bytes" in tokens else ""
    yield "tokens to experts and back, MB compiled" + (" beside 4 * ranks * rows * D * bytes:" if formula else ":")
    yield f"  {'':<20}{tokens['compiled_bytes'] / 1e6:>14,.3f}{formula}"
    if "embedding" in report:
        compiled, formula = (report["embedding"][f"{name}_bytes"] / 1e6 for name in ("compiled", "formula"))
        rounds = report["embedding"]["rounds"]
        yield f"rows of the embedding and back in {rounds} rounds, MB compiled beside 2 * rounds * places * D * bytes:"
        yield f"  {'':<20}{compiled:>14,.3f} {formula:>14,.3f}"
    if "head" in report:
        compiled, formula = (report["head"][f"{name}_bytes"] / 1e6 for name in ("compiled", "formula"))
        yield "tokens to the shares of the head and back, MB compiled beside 2 * ranks * rows * D * bytes:"
        yield f"  {'':<20}{compiled:>14,.3f} {formula:>14,.3f}"
    predicted = report["predicted"]
    if predicted:
        yield (
            f"predicted: {predicted['step_ms']:.4g} ms, {100 * predicted['flops_utilization']:.1f} % of the peak FLOPs"
        )
        yield from (f"  {words:<36}{predicted[f'{name}_ms']:>10.4g} ms" for name, words in _PARTS.items())
