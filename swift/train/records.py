"""Records of steps and plans for ``metrics.jsonl`` and ``events.jsonl``, and a run's summary.

A step's record combines the metrics from the devices with the planned period and the hardware's peak.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from swift.checkpoint.manifest import VALIDATION
from swift.config.experiment import Experiment
from swift.data.loader import SourceBatches
from swift.data.windows import Batch
from swift.errors import RunError, SettingError
from swift.experts.placement.replicas import replica_error
from swift.mesh.devices import host_matmul_flops, peak_flops
from swift.pipeline.reconfigure.compiled_steps import Steps
from swift.pipeline.step.metrics import Sums
from swift.pipeline.step.spec import StepSpec
from swift.runlog.files import ROUTER_PREFIX, ranges_text
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
        **router_fields(metrics.get("numbers", {})),
    }


def router_fields(numbers: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns a router's own numbers as fields of a record: the mean over the layers, then each layer.

    >>> router_fields({"entropy": np.array([1.0, 2.0])})
    {'router.entropy': 1.5, 'router.entropy.0': 1.0, 'router.entropy.1': 2.0}
    >>> list(router_fields({"probs": np.array([[0.25, 0.75]])}))
    ['router.probs-0', 'router.probs-0.0', 'router.probs-1', 'router.probs-1.0']
    """
    fields = {}
    for name, values_L in numbers.items():
        by_element = values_L.reshape(len(values_L), -1).T
        for element, value_L in enumerate(by_element):
            field = f"{ROUTER_PREFIX}{name}" + (f"-{element}" if values_L.ndim > 1 else "")
            fields[field] = float(value_L.mean())
            fields |= {f"{field}.{layer}": float(value) for layer, value in enumerate(value_L)}
    return fields


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


class ValidationBatches(Batches, Protocol):
    """The batches of the validation split."""

    @property
    def parts(self) -> Sequence[SourceBatches]:
        """Batches of each source in a pass over the split."""

    def num_bytes(self, step: int) -> int | None:
        """Counts the bytes of text in the labels of a batch, on all hosts; None if they are unknown."""


def validation_record(
    evaluate: Callable[[Batch], Sums],
    validation: ValidationBatches,
    num_batches: int,
    parts: Sequence[SourceBatches] | None = None,
) -> dict[str, float]:
    """Evaluates the first batches of each source.

    Args:
        evaluate: function that returns the sums of one batch.
        validation: batches of the split.
        num_batches: maximum number of batches of each source; at most one pass over it is evaluated.
        parts: sources to evaluate; None for all.

    Returns:
        ``validation_loss``, in nats per token, and ``validation_bits_per_byte`` if the bytes of the text are known. In
        a mixture both are means by the sources' weights, and each source's own follow, such as
        ``validation_loss/web``.
    """
    losses, sizes = dict[str, float](), dict[str, float]()  # nats and bytes per token of each source
    parts = validation.parts if parts is None else parts
    for part in parts:
        loss, tokens, weight, num_bytes = 0.0, 0, 0.0, list[int | None]()
        for index in part.batches[:num_batches]:
            sums = evaluate(validation.batch(index))
            loss, tokens = loss + float(sums.loss), tokens + int(sums.tokens)
            weight += float(sums.tokens if sums.weight is None else sums.weight)
            # A weighted loss is not that of the whole text.
            num_bytes.append(validation.num_bytes(index) if sums.weight is None else None)
        losses[part.name] = loss / (weight or 1)
        known = [number for number in num_bytes if number is not None]
        sizes[part.name] = sum(known) / max(tokens, 1) if len(known) == len(num_bytes) else 0.0
    weights = {part.name: part.weight for part in parts}
    record = _validation("", _mean(losses, weights), _mean(sizes, weights) if all(sizes.values()) else 0.0)
    for name in filter(None, losses):
        record |= _validation(f"/{name}", losses[name], sizes[name])
    return record


def _validation(suffix: str, loss: float, bytes_per_token: float) -> dict[str, float]:
    bits = {f"validation_bits_per_byte{suffix}": loss / (math.log(2) * bytes_per_token)} if bytes_per_token else {}
    return {f"validation_loss{suffix}": loss, **bits}


def _mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if len(values) == 1:
        return next(iter(values.values()))  # exact, without the rounding of a product and a quotient
    return sum(weights[name] * value for name, value in values.items()) / sum(weights.values())


@dataclass(frozen=True)
class Validations:
    """The validation losses of a run so far: the newest, and the one that has to be improved upon.

    Losses are in nats per token.

    Attributes:
        step: iteration of the newest evaluation; 0 before the first.
        loss: its loss.
        best_step: iteration of the last improvement.
        best_loss: loss of the last improvement; infinite before the first evaluation.
        num_since: evaluations since the last improvement.
        min_improvement: by how much a loss has to be below ``best_loss`` to be an improvement.
        num_tokens: tokens of an evaluation: losses are compared only if they are over the same text.
    """

    step: int = 0
    loss: float = math.inf
    best_step: int = 0
    best_loss: float = math.inf
    num_since: int = 0
    min_improvement: float = 0.0
    num_tokens: int = 0

    def with_loss(self, step: int, loss: float) -> "Validations":
        """Returns the validations after one more."""
        now = replace(self, step=step, loss=loss)
        if loss < self.best_loss - self.min_improvement:
            return replace(now, best_step=step, best_loss=loss, num_since=0)
        return replace(now, num_since=self.num_since + 1)

    def is_over(self, patience: int | None) -> bool:
        """Returns whether the run is to stop."""
        return patience is not None and self.num_since >= patience

    def ends_early(self, experiment: Experiment) -> bool:
        """Returns whether a run ends here, before its last iteration."""
        return self.is_over(experiment.patience) and self.step < experiment.num_steps

    @property
    def reason(self) -> str:
        """Phrase that says why the run stops."""
        by = f" by more than {self.min_improvement:g}" if self.min_improvement else ""
        since = f"has not improved{by} in {self.num_since} evaluations"
        return f"the validation loss {since}; the best was {self.best_loss:.4f} at iteration {self.best_step}"

    @classmethod
    def restored(cls, extra: Mapping[str, Any], min_improvement: float, num_tokens: int = 0) -> "Validations":
        """Returns the validations stored in a manifest's ``extra``.

        If ``min_improvement`` has changed since, evaluations count from the checkpoint on; if ``num_tokens`` has, there
        are none yet, since earlier losses are over other text.
        """
        stored: Mapping[str, Any] = extra.get(VALIDATION) or {}
        fields: dict[str, Any] = {name: math.inf if value is None else value for name, value in stored.items()}
        read = cls(**fields)
        if read.num_tokens != num_tokens:
            return cls(min_improvement=min_improvement, num_tokens=num_tokens)
        is_same = read.min_improvement == min_improvement
        return replace(read, min_improvement=min_improvement, num_since=read.num_since if is_same else 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for ``restored``; a loss that is not finite is None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def summarize(
    experiment: Experiment, directory: RunDirectory, device: str, stopped: Validations | None = None, **more: Any
) -> dict[str, Any]:
    """Computes the summary of a run, and writes it if the run has reached its end.

    The summary is computed from the run's record, so a resumed run has the same summary as an uninterrupted one.

    Args:
        experiment: settings of the run.
        directory: run directory.
        device: device model.
        stopped: validations for which the run has stopped before its last iteration; None if it has not.
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
    facts: dict[str, Any] = {
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
    if stopped is not None:
        summary["stopped_early"] = {
            "step": stopped.step,
            "best_step": stopped.best_step,
            "best_loss": stopped.best_loss,
        }
    if run.metrics.last_step == experiment.num_steps or stopped is not None:
        directory.write_summary(summary)
    return summary
