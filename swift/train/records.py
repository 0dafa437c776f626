"""Records of steps and plans for ``metrics.jsonl`` and ``events.jsonl``, and a run's summary.

A step's record combines the metrics from the devices with the planned period and the hardware's peak.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from swift.config.experiment import Experiment
from swift.data.windows import Batch
from swift.errors import RunError, SettingError
from swift.experts.placement.replicas import replica_error
from swift.mesh.devices import host_matmul_flops, peak_flops
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.step.metrics import Sums
from swift.pipeline.step.spec import StepSpec
from swift.runlog.files import ranges_text
from swift.runlog.reading import measure, read_run
from swift.runlog.run_directory import RunDirectory
from swift.schedules.plans.normalize import ChunkAssignment, plan_document
from swift.topology import worker_names


def step_record(step: int, metrics: Mapping[str, Any], step_s: float, spec: StepSpec, input_s: float) -> dict[str, Any]:
    """Builds the record of one iteration; it has the field ``invalid_placement`` only if the placement is invalid.

    Args:
        step: number of the iteration, from 1.
        metrics: metrics of the step, on the host, without the worker dimension.
        step_s: duration of the iteration, in seconds.
        spec: spec of the step, with the workers and expert ranks that took part.
        input_s: time within ``step_s`` that the host spent reading batches, usually those of the next iteration, in
            seconds.
    """
    live = spec.live
    popularity_LE, dropped_LE, replicas_LE = (metrics[name] for name in ("popularity", "dropped", "replicas"))
    routed, dropped, tokens = int(popularity_LE.sum()), int(dropped_LE.sum()), int(metrics["tokens"])
    flaw = replica_error(replicas_LE, live.num_ranks * spec.experts.slots_per_rank)
    return ({} if flaw is None else {"invalid_placement": flaw}) | {
        "step": step,
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "tokens": tokens,
        **({"loss_weight": float(metrics["loss_weight"])} if "loss_weight" in metrics else {}),
        "tokens_routed": routed,
        "tokens_dropped": dropped,
        "tokens_overflowed": int(metrics["overflowed"].sum()),
        "drop_fraction": dropped / max(routed, 1),
        "load_imbalance": float(metrics["load_imbalance"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "step_ms": 1000 * step_s,
        "input_ms": 1000 * input_s,
        "tokens_per_s": tokens / step_s,
        "live_workers": live.num_live,
        "live_ranks": live.num_ranks,
        "popularity": popularity_LE.tolist(),
        "replicas": replicas_LE.tolist(),
        "dropped": dropped_LE.tolist(),
        **({"numbers": _listed(metrics["numbers"])} if "numbers" in metrics else {}),
    }


def _listed(numbers: Mapping[str, np.ndarray]) -> dict[str, list]:
    """Returns a router's own numbers as lists, with a number or list for each layer."""
    return {name: value_L.tolist() for name, value_L in numbers.items()}


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization (MFU): a run's own FLOPs as a share of the hardware's peak.

    Attributes:
        flops_per_token: see ``GPT.flops_per_token``.
        peak_flops: peak FLOP/s of each device, or of the device or host that all ranks share; None if unknown.
        is_shared: whether all ranks share one device or host.
    """

    flops_per_token: int
    peak_flops: float | None
    is_shared: bool

    @classmethod
    def of(cls, spec: StepSpec) -> "Utilization":
        """Looks up the peak FLOP/s of the accelerator that runs a step, or measures the peak on a CPU."""
        device = spec.live.mesh.devices.flat[0]
        is_cpu = device.platform == "cpu"
        peak = host_matmul_flops(spec.compute_dtype) if is_cpu else peak_flops(device, spec.compute_dtype)
        is_shared = is_cpu or spec.live.mesh.size == 1
        return cls(spec.gpt.flops_per_token(spec.experts.top_k), peak, is_shared)

    def mfu(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Returns the field ``mfu`` for the record of an iteration, or no field if the peak is unknown."""
        if self.peak_flops is None:
            return {}
        num_devices = 1 if self.is_shared else record["live_workers"] * record["live_ranks"]
        return {"mfu": record["tokens_per_s"] * self.flops_per_token / (self.peak_flops * num_devices)}


def plan_facts(steps: Steps) -> dict[str, Any]:
    """Returns the fields of a pipeline's plan for ``events.jsonl``.

    They are the failed workers, the positions of workers that stand in for others, and the schedule; see ``read_plan``.
    """
    configuration = steps.configuration
    failed = worker_names(configuration.failed)
    return {
        "failed": failed,
        "positions": ChunkAssignment(moves=configuration.moves).positions,
        "plan": plan_document(steps.plan.schedule),
    }


def plan_record(steps: Steps, period_ratio: float, **more: Any) -> dict[str, Any]:
    """Returns the fields that the plan adds to an iteration's record; a single worker has no plan and adds none.

    Args:
        steps: step functions of the live workers.
        period_ratio: planned duration of an iteration, relative to an iteration without failures.
        **more: further fields to add if there is a plan.
    """
    if steps.spec.is_single_worker:
        return {}
    return {"bubble_share": steps.plan.bubble_share, "period_ratio": period_ratio, **more}


class Batches(Protocol):
    """The batches of a split, accessed by number, such as a ``Loader``."""

    def batch(self, step: int) -> Batch:
        """Loads a batch, or as much of it as this process needs."""

    @property
    def num_batches_per_epoch(self) -> int:
        """Number of batches in one pass over all windows, rounded up."""


def mean_loss(evaluate: Callable[[Batch], Sums], validation: Batches, num_batches: int) -> float:
    """Computes the mean loss on a split's first batches, weighted as in training, in nats per token.

    Args:
        evaluate: function that returns the sums of one batch.
        validation: batches of the split.
        num_batches: maximum number of batches; at most one pass over the split is evaluated.
    """
    loss, weight = 0.0, 0.0
    for index in range(min(num_batches, validation.num_batches_per_epoch)):
        sums = evaluate(validation.batch(index))
        loss, weight = loss + float(sums.loss), weight + float(sums.tokens if sums.weight is None else sums.weight)
    return loss / (weight or 1)


def summarize(experiment: Experiment, directory: RunDirectory, device: str, **more: Any) -> dict[str, Any]:
    """Computes the summary of a run, and writes it if the run has reached its end.

    The summary is computed from the run's record, so a resumed run has the same summary as an uninterrupted one.

    Args:
        experiment: settings of the run.
        directory: run directory.
        device: device model.
        **more: further JSON-serializable fields.

    Raises:
        RunError: the record is damaged. A run in progress does not read its record, so the damage is only found at the
            end, when the checkpoints are already saved.
    """
    try:
        run = read_run(directory.path)
    except SettingError as error:
        reason = f"the iterations are done and saved, but their record cannot be summed up: {error}"
        raise RunError(f"{reason}; without the damage, swift report shows the run") from error
    facts = {
        "name": directory.path.name,
        "placement": experiment.placement.name,
        "layout": experiment.optimizer.layout,
        "ranks": experiment.ranks,
        "pipelines": experiment.topology.num_pipelines,
        "stages": experiment.topology.num_stages,
        "device": device,
        "jax_version": jax.__version__,
        "num_steps": experiment.num_steps,
        "target_loss": experiment.target_loss,
    }
    summary = facts | measure(run, experiment.target_loss) | more
    if missing := run.metrics.missing:
        summary["steps_without_record"] = ranges_text(missing)
    if run.metrics.last_step == experiment.num_steps:
        directory.write_summary(summary)
    return summary
