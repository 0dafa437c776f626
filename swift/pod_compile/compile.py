"""Compiles a configuration ahead of time for an absent pod, and reports on its program."""

import re
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from swift.config.cuts import model_chunks
from swift.config.experiment import Experiment
from swift.config.failures import failure_list
from swift.errors import SettingError
from swift.mesh.devices import ProgramMemory
from swift.mesh.hlo_collectives import collectives
from swift.mesh.live import live_mesh
from swift.models.vocabulary.lookup import max_rounds
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.reconfigure.configuration import Configurator, neighbours
from swift.pipeline.step.single_worker import sequences_per_rank
from swift.pod_compile.costs import Interconnect, OpCounts, op_costs, predict, total_flops
from swift.pod_compile.pods import Pod, described_devices
from swift.pod_compile.traffic import bytes_by_kind, bytes_in_transit, exchange, head_tokens, looked_up_rows, tokens
from swift.topology import Worker, worker_names
from swift.train.build import make_plan_settings, make_step_spec, with_num_ranks
from swift.train.emulated import FailedSet

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_EXHAUSTED = (
    re.compile(rf"Used {_SIZE} of {_SIZE} \w+"),
    re.compile(rf"\({_SIZE}\) exceeds available \w+ \({_SIZE}\)"),
)
FITS, TOO_LARGE, REFUSED = "fits", "too large", "refused"
"""Results of compiling a configuration; the result is also ``fits`` if the chip's memory size is unknown."""


def check_pod(experiment: Experiment, pod: Pod) -> None:
    """Raises SettingError unless an experiment's topology uses exactly the devices of a pod."""
    if experiment.ranks == "virtual":
        allowed = "runs on one device only; set 'devices' to compile for a pod"
        raise SettingError("Experiment.ranks", "virtual", allowed)
    topology = experiment.topology
    if topology.num_devices != pod.num_devices:
        shape = f"{topology.num_pipelines} x {topology.num_stages} x {topology.num_expert_ranks}"
        allowed = f"has {pod.num_devices} devices, and Topology's {shape} (pipelines x stages x expert ranks) make "
        raise SettingError("--topology", pod.name, f"{allowed}{topology.num_devices}: set Topology to fit")


def configurations(experiment: Experiment, failed: frozenset[Worker] | None, *, near: bool) -> list[FailedSet]:
    """Lists the configurations to compile, each by its failures.

    Args:
        experiment: experiment to compile.
        failed: failed workers, or None for the configurations of the first window and of the windows that start
            with an event in the experiment's failure list.
        near: whether to include configurations one failure or one return away; with a single pipeline, those with one
            expert rank fewer or more.

    Raises:
        SettingError: a worker does not exist, or a stage is left without a live worker.
    """
    failures, window = failure_list(experiment), experiment.window
    if failed is not None:
        experiment.topology.live_workers(failed)
        downs = [FailedSet(failed, frozenset())]
    else:
        firsts = [1, *(event.step for event in failures.events)]
        downs = [
            FailedSet(failures.failed(first, first + window - 1), failures.lost_ranks(first, first + window - 1))
            for first in firsts
        ]
    if near:
        downs += [other for down in downs for other in _near(experiment, down)]
    return list(dict.fromkeys(downs))


def _near(experiment: Experiment, down: FailedSet) -> Iterator[FailedSet]:
    topology = experiment.topology
    if topology.num_pipelines > 1:
        yield from (
            FailedSet(failed, frozenset()) for failed in neighbours(topology, down.workers, model_chunks(experiment))
        )
        return
    lost = {rank for _, rank in down.ranks}
    remaining = [rank for rank in range(topology.num_expert_ranks) if rank not in lost]
    if len(remaining) > 1:
        yield FailedSet(frozenset(), down.ranks | {(0, remaining[-1])})
    if down.ranks:
        yield FailedSet(frozenset(), down.ranks - {max(down.ranks)})


def compile_one(experiment: Experiment, pod: Pod, down: FailedSet) -> dict[str, Any]:
    """Plans, lowers and compiles the main step of a configuration; returns the report, see ``json_format``.

    Raises:
        SettingError: the pod's compiler is not installed, or there is no plan.
    """
    live = live_mesh(experiment.topology, "devices", devices=described_devices(pod))
    lost = {rank for _, rank in down.ranks}
    ranks = [rank for rank in range(live.num_ranks) if rank not in lost]
    if lost:
        experiment, live = with_num_ranks(experiment, len(ranks)), live.with_ranks(ranks)
    spec = make_step_spec(experiment, live, pod.chip.platform)
    configuration = Configurator(make_plan_settings(experiment, spec)).configure(down.workers)
    steps = Steps(spec.at(live.with_rows(configuration.rows)), configuration, experiment.sequences_per_microbatch)
    start_time = time.perf_counter()
    lowered = steps.lowered(steps.main)
    lowered_s = time.perf_counter() - start_time
    report: dict[str, Any] = {
        "failed": worker_names(down.workers),
        "lost_ranks": sorted(lost),
        "devices": steps.spec.live.mesh.size,
        "program": steps.main,
        "attention": spec.gpt.kernel,
        "iterations": configuration.window if steps.main == "window" else 1,
        "lower_s": round(lowered_s, 2),
    }
    result = _compiled(lowered, pod)
    report["compile_s"] = round(time.perf_counter() - start_time - lowered_s, 2)
    if not isinstance(result, Compiled):
        return report | result
    return report | _memory(result, pod) | _facts(result, steps, experiment, pod)


def _compiled(lowered: Lowered, pod: Pod) -> Compiled | dict[str, Any]:
    """Compiles the program, or reports why it cannot be compiled."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        sizes = next(filter(None, (form.search(reason) for form in _EXHAUSTED)), None)
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            return {"result": REFUSED, "reason": reason[:400]}
        needed = None if sizes is None else _bytes(sizes[1], sizes[2])
        capacity = pod.chip.memory_bytes if sizes is None else _bytes(sizes[3], sizes[4])
        return {"result": TOO_LARGE, "memory": {"needed_bytes": needed, "capacity_bytes": capacity}}


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _memory(compiled: Compiled, pod: Pod) -> dict[str, Any]:
    """Reports the memory that the program needs on a device, and whether it fits."""
    memory, capacity = ProgramMemory.of(compiled), pod.chip.memory_bytes
    assert memory is not None, "all compilers of pods keep an account"
    parts = {f"{name}_bytes": getattr(memory, name) for name in ("arguments", "results", "temporary", "code")}
    names = ("host_arguments_bytes", "host_results_bytes", "host_temporary_bytes")
    host = dict(zip(names, memory.host, strict=True))
    result = FITS if capacity is None or memory.needed <= capacity else TOO_LARGE
    return {"result": result, "memory": {"needed_bytes": memory.needed, "capacity_bytes": capacity, **parts, **host}}


def _facts(compiled: Compiled, steps: Steps, experiment: Experiment, pod: Pod) -> dict[str, Any]:
    """Reports the collectives, floating-point operations and predicted time of a compiled step."""
    spec, plan = steps.spec, steps.plan
    live = spec.live
    num_sequences = sequences_per_rank(experiment.sequences_per_microbatch, live.num_ranks)
    collective_ops = collectives(compiled.as_text() or "", live.mesh.size)
    table = None if spec.is_single_worker else plan.table
    rounds = max_rounds(num_sequences * spec.gpt.config.sequence_length, spec.gpt.vocab_size, live.num_ranks)
    runs = OpCounts(spec, table, plan.schedule.problem.num_iterations, rounds)
    work, coords = op_costs(spec, num_sequences), [_coords(device, pod) for device in live.mesh.devices.flat]
    num_flops, by_group = total_flops(runs, work), exchange(collective_ops, runs)
    moved = bytes_in_transit(collective_ops, runs, num_sequences)
    step = predict(runs, work, moved, Interconnect(pod, coords), experiment.compute_dtype)
    if step is not None and pod.chip.peak_flops:
        peak = live.mesh.size * pod.chip.peak_flops[experiment.compute_dtype]
        step["flops_utilization"] = num_flops / peak / (step["step_ms"] / 1e3)
    head = {"head": head_tokens(collective_ops, runs, num_sequences)} if spec.gpt.head_ranks > 1 else {}
    rows = {"embedding": looked_up_rows(collective_ops, runs, num_sequences)} if spec.gpt.embedding_ranks > 1 else {}
    return {
        "collectives": bytes_by_kind(collective_ops, runs),
        "exchange": {
            name: sum(group[name] for group in by_group.values()) for name in ("compiled_bytes", "formula_bytes")
        }
        | {"groups": by_group},
        "tokens": tokens(collective_ops, runs, num_sequences),
        **rows,
        **head,
        "flops": num_flops,
        "bubble_share": 0.0 if spec.is_single_worker else plan.bubble_share,
        "predicted": step,
    }


def _coords(device: Any, pod: Pod) -> tuple[int, ...]:
    """Returns the coordinates of a device: (x, y, ...) for a TPU, otherwise (host, index within the host)."""
    if pod.chip.platform == "tpu":
        return tuple(device.coords[: len(pod.shape)])
    per_host = pod.shape[-1]
    return device.id // per_host, device.id % per_host
