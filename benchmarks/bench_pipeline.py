"""Cost of running a schedule compared with a plain single-device step: CPU-seconds, compile times, FLOPs, bytes.

The plain step is what one would write without this library: ``jax.grad`` of the model on one device, summed over the
same micro-batches, and optax; same global batch, same process, in turns. Figures:

- ``iteration``: CPU-seconds of an iteration over the plain one's, dense and with experts;
- ``window_of_3_over_3_iterations``: CPU-seconds of a window with staggered updates over those with barriers;
- ``idle_tick_cpu_us``: CPU-microseconds of a tick in which all workers are idle, by device;
- ``compile``: seconds to compile with 32 micro-batches over those with 8;
- ``compile_by_layers``: CPU-seconds to compile a step of 32 and 64 layers over one of 8;
- ``stage``: FLOPs of F + B + W over those of the fused forward and backward, without and with rematerialisation, and
  the bytes stashed per micro-batch;
- ``reconfiguration``: wall time of a failure and of a return, in fault-free iterations, prepared and not.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import cost_of, cpu_seconds, paired_costs, publish, ratio
from pipeline_steps import SEQUENCES, Lone, Pipelined, Plain, Stepped, draw_batch, experiment

from swift.config.experiment import Experiment
from swift.mesh.devices import emulate_devices
from swift.mesh.per_rank import EXPERT_AXIS
from swift.models.config import ModelConfig
from swift.pipeline.step.costs import split_stage, stash_bytes
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.pipeline.step.stage import block_function, block_shapes
from swift.schedules.lowering.tick_table import NONE, NOTHING, Moves, TickTable
from swift.topology import Worker
from swift.train.build import make_engine, make_step_spec

ROUNDS = 9
IDLE_TICKS = 2_000


def iteration(setup: Experiment, failed: frozenset[Worker] = frozenset()) -> dict[str, Any]:
    """Measures CPU-seconds of a pipeline's iteration and of the plain one, in turns."""
    batch = draw_batch(setup)
    calls = {"pipelined": Pipelined(setup, failed, batch), "plain": Plain(setup, batch), "lone": Lone(setup, batch)}
    first = [float(np.ravel(jax.device_get(call()))[0]) for call in calls.values()]
    assert max(first) - min(first) < 1e-4, f"they compute different losses: {first}"
    costs = paired_costs(dict(calls), ROUNDS)
    return {
        "ticks": calls["pipelined"].table.num_ticks,
        "compile_s": round(calls["pipelined"].compile_s, 2),
        "cpu_s": {name: round(statistics.median(values), 4) for name, values in costs.items()},
        "pipelined_over_plain": ratio(costs, "pipelined", "plain"),
        "pipelined_over_lone": ratio(costs, "pipelined", "lone"),
    }


def window(setup: Experiment) -> dict[str, float]:
    """Measures CPU-seconds of a window of 3 iterations over those of three iterations with a barrier, in turns."""
    batch, calls = draw_batch(setup), {}
    for name, length in (("window", 3), ("singles", 1)):
        engine = make_engine(replace(setup, window=length), frozenset(), "none")
        calls[name] = Stepped(engine, [batch] * 3)
    return ratio(paired_costs(dict(calls), ROUNDS), "window", "singles")


def idle_tick_cpu_us(setup: Experiment) -> float:
    """Measures CPU-microseconds per device of a tick in which all workers are idle."""
    pipeline = Pipelined(setup, frozenset(), draw_batch(setup))

    def seconds(num_ticks: int) -> float:
        run, _ = pipeline.compiled(idle(pipeline.table, num_ticks))

        def call() -> Any:
            pipeline.state, metrics = run(pipeline.state, pipeline.rows)
            return metrics["loss"]

        call()
        return statistics.median(cost_of(call) for _ in range(ROUNDS))

    return 1e6 * (seconds(IDLE_TICKS) - seconds(1)) / IDLE_TICKS / pipeline.spec.live.mesh.size


def idle(table: TickTable, num_ticks: int) -> TickTable:
    """Builds a tick table with ``num_ticks`` idle ticks and no messages."""

    def silent(moves: Moves) -> Moves:
        none = np.full_like(moves.permutation_TQ, NONE), np.full_like(moves.slot_TQR, NONE)
        return replace(moves, permutation_TQ=none[0], slot_TQR=none[1])

    once = replace(
        table,
        opcode_TR=np.full_like(table.opcode_TR, NOTHING),
        activations=silent(table.activations),
        gradients=silent(table.gradients),
    )
    shape = table.shape._replace(num_ticks=max(num_ticks, table.num_ticks))
    longer = once.padded(shape)
    return replace(longer, phase_bounds=np.array([0, *[num_ticks] * table.num_phases], np.int32))


def compile_ratio() -> dict[str, Any]:
    """Measures the ratio of compile times with 32 and with 8 micro-batches, in turns."""
    seconds: dict[str, list[float]] = {"8": [], "32": []}
    for _ in range(3):
        for name, times in seconds.items():
            setup = experiment((2, 2, 1), int(name), moe=False)
            times.append(Pipelined(setup, frozenset(), draw_batch(setup)).compile_s)
    return {"seconds": seconds, "32_over_8": ratio(seconds, "32", "8")}


def compile_by_layers(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Measures CPU-seconds to compile a step of models of 8, 32 and 64 layers, every second with experts, in turns."""
    seconds: dict[str, list[float]] = {"8": [], "32": [], "64": []}
    for _ in range(3):
        for name, times in seconds.items():
            model = ModelConfig(int(name), 64, 4, 128, sequence_length=64, moe_pattern=(False, True))
            setup = replace(experiment(shape, 2, moe=True), model=model)
            batch = draw_batch(setup)
            started = cpu_seconds()
            if shape == (1, 1, 1):
                spec = make_step_spec(setup)
                single_worker_step(spec).lower(spec.abstract(with_slots=True), put_batch(batch, spec.live)).compile()
            else:
                Pipelined(setup, frozenset(), batch)
            times.append(cpu_seconds() - started)
    return {"cpu_s": seconds} | {f"{name}_over_8": ratio(seconds, name, "8") for name in ("32", "64")}


def stage_figures(*, moe: bool) -> dict[str, Any]:
    """Compares a block's FLOPs of F + B + W with those of the fused pass; sums a stage's bytes per micro-batch."""
    figures: dict[str, Any] = {}
    fused_flops = {}
    for remat in (False, True):
        spec = make_step_spec(experiment((1, 2, 1), 1, moe=moe, remat="block" if remat else "none"))
        stage, (layers, extras, x) = split_stage(spec, SEQUENCES)
        parts, given = stage.kinds[moe], block_shapes(layers, extras, moe)
        out = (x, jax.ShapeDtypeStruct((), jnp.float32))

        fused = fused_pass(block_function(spec))
        split_flops = (
            flops(parts.forward, *given, x)
            + flops(parts.backward_input, *given, *parts.stash_shapes[:2], out)
            + flops(parts.backward_weight, *given, *parts.stash_shapes[1:])
        )
        fused_flops[remat] = flops(fused, *given, x, out)
        kept = dict(zip(("f_to_b", "f_to_w", "b_to_w"), stage.stash_shapes, strict=True))
        figures["rematerialised" if remat else "plain"] = {
            "split_over_fused_flops": round(split_flops / fused_flops[remat], 4),
            "kept_bytes": {name: stash_bytes(shapes) for name, shapes in kept.items()},
        }
    return figures | {"rematerialised_over_plain_flops": round(fused_flops[True] / fused_flops[False], 4)}


def fused_pass(block: Callable[..., Any]) -> Callable[..., Any]:
    """Builds one function for the forward and backward pass of a block."""

    def run(weights: Any, extras: Any, x: Any, d_out: Any) -> Any:
        out, pull_back, load = jax.vjp(lambda weights, x: block(weights, extras, x), weights, x, has_aux=True)
        return out, pull_back(d_out), load

    return run


def flops(function: Callable[..., Any], *shapes: Any) -> float:
    """Returns the FLOPs of a compiled function according to XLA."""

    def run(*arguments: Any) -> Any:
        return jax.vmap(function, axis_name=EXPERT_AXIS, axis_size=1)(*arguments)

    ranked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), shapes)
    return jax.jit(run).lower(*ranked).compile().cost_analysis()["flops"]


def reconfiguration() -> dict[str, Any]:
    """Measures the wall time of a failure and of a return, until the next batch is on the devices, in iterations.

    Prepared: planned and compiled in the background, never run.
    """
    setup = experiment((2, 2, 2), 4, moe=True)
    batch = draw_batch(setup)
    figures: dict[str, Any] = {}
    for prepare in ("none", "next"):
        with make_engine(setup, frozenset(), prepare) as engine:
            stepped, times = Stepped(engine, [batch]), []
            stepped()
            engine.settle()
            for _ in range(ROUNDS):
                started = time.perf_counter()
                stepped()
                times.append(time.perf_counter() - started)
            for name, down in (("failure", frozenset({(1, 1)})), ("return", frozenset[Worker]())):
                engine.settle()
                started = time.perf_counter()
                stepped.state, change = engine.reconfigure(stepped.state, down)
                jax.block_until_ready(engine.put([batch]))
                took = (time.perf_counter() - started) / statistics.median(times)
                figures[f"{name}, prepare={prepare}"] = {
                    "iterations": round(took, 3),
                    "prepared": change.prepared,
                    "moved_bytes": change.moved_bytes,
                }
                stepped()
    return figures | {"iteration_ms": round(1000 * statistics.median(times), 1)}


def main() -> int:
    emulate_devices(12)
    shapes = {"1x1x1": (1, 1, 1), "2x2x1": (2, 2, 1)}
    figures: dict[str, Any] = {"iteration": {}}
    for kind, moe in (("dense", False), ("experts", True)):
        for name, shape in shapes.items():
            num_microbatches = 8 // shape[0]
            figures["iteration"][f"{name} {kind}"] = iteration(experiment(shape, num_microbatches, moe=moe))
        failed = frozenset({(1, 2)})
        figures["iteration"][f"3x4x1 {kind}, 1:2 down"] = iteration(experiment((3, 4, 1), 6, moe=moe), failed)
    figures["idle_tick_cpu_us"] = round(idle_tick_cpu_us(experiment((2, 2, 1), 4, moe=False)), 1)
    figures["window_of_3_over_3_iterations"] = {
        "2x2x1": window(experiment((2, 2, 1), 4, moe=False)),
        "3x4x1": window(experiment((3, 4, 1), 6, moe=False)),
    }
    figures["compile"] = compile_ratio()
    figures["compile_by_layers"] = {name: compile_by_layers(shape) for name, shape in shapes.items()}
    figures["stage"] = {kind: stage_figures(moe=moe) for kind, moe in (("dense", False), ("experts", True))}
    figures["reconfiguration"] = reconfiguration()
    ratios = {name: figure["pipelined_over_plain"]["median"] for name, figure in figures["iteration"].items()}
    claims = {
        f"{name} {kind}: CPU-seconds over the plain step's": (ratios[f"{name} {kind}"], limit)
        for kind in ("dense", "experts")
        for name, limit in (("1x1x1", 1.15), ("2x2x1", 1.25))
    }
    claims |= {
        f"3x4x1 {kind}, 1:2 down: CPU-seconds over the plain step's": (ratios[f"3x4x1 {kind}, 1:2 down"], 1.1)
        for kind in ("dense", "experts")
    }
    claims["compiling 32 micro-batches over 8"] = (figures["compile"]["32_over_8"]["median"], 1.2)
    for name, found in figures["compile_by_layers"].items():
        claims[f"{name}: compiling 32 layers over 8"] = (found["32_over_8"]["median"], 1.3)
        claims[f"{name}: compiling 64 layers over 8"] = (found["64_over_8"]["median"], 1.5)
    for kind, stage in figures["stage"].items():
        for remat in ("plain", "rematerialised"):
            claims[f"FLOPs split over fused, {kind}, {remat}"] = (stage[remat]["split_over_fused_flops"], 1.02)
    for name in ("failure, prepare=next", "return, prepare=next"):
        claims[f"{name}, in iterations"] = (figures["reconfiguration"][name]["iterations"], 1.0)
    return publish("running a schedule, demo model", figures, claims)


if __name__ == "__main__":
    sys.exit(main())
