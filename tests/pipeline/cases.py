"""Cases in which a pipeline is compared with the plain single-device model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swift.config.experiment import Experiment
from swift.data.config import DataConfig
from swift.experts.config import Capacity, ExpertConfig, SlotCapacity
from swift.experts.optimizer import OptimizerConfig
from swift.experts.placement.policy import Static
from swift.experts.routers import ExpertChoice, NoisyTopK, Sinkhorn, TopK
from swift.experts.routing import Number, Router, Routing
from swift.models.config import ModelConfig
from swift.topology import Topology

NUM_CLASSES = 4


def documented_block():
    """The block of the guide."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    (code,) = re.findall(r"```python\n# my_block.py\n(.*?)```", guide, re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_block"}
    exec(code, names)
    return names["Averaging"]()


@dataclass(frozen=True)
class Threshold(Router):
    """A router of a user's own: one or two experts by a noisy threshold that moves with the load; with numbers."""

    draws_noise = True

    def most_choices(self, num_classes, top_k):  # noqa: ARG002
        return 2

    def init_state(self, num_classes):
        return {"level_E": np.zeros(num_classes, np.float32), "seen": np.zeros((), np.float32)}

    def update_state(self, state, popularity_E):
        share_E = popularity_E / jnp.maximum(popularity_E.sum(), 1)
        return {"level_E": 0.9 * state["level_E"] + 0.3 * share_E, "seen": 0.5 * state["seen"] + 1}

    def route(self, tokens, num_classes, top_k):  # noqa: ARG002
        logits_TE = tokens.logits_TX - (tokens.state["level_E"] * tokens.state["seen"])[None]
        if tokens.noise is not None:
            logits_TE += 0.3 * tokens.noise.draw(jax.random.gumbel, num_classes, dtype=logits_TE.dtype)
        probs_TE = jax.nn.softmax(logits_TE)
        best_T2, choices_T2 = jax.lax.top_k(probs_TE, 2)
        is_choice_T2 = best_T2 > jnp.asarray([[0.0, 0.2]])
        gates_T2 = jnp.where(is_choice_T2, best_T2, 0)
        numbers = {
            "probs": Number.mean(probs_TE, tokens.valid_T),
            "choices": Number(jnp.sum(is_choice_T2 & tokens.valid_T[:, None], dtype=probs_TE.dtype)),
        }
        return Routing(choices_T2.astype(jnp.int32), gates_T2, probs_TE, is_choice_T2, numbers)


_MODERN = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
DECODERS = {
    "": ({}, {}),
    "shared": (
        _MODERN | {"num_shared_experts": 2, "expert_dim": 6, "num_kv_heads": 1, "qk_norm": "head"},
        {"router": TopK(normalize_gates=False)},
    ),
    "sigmoid": (
        _MODERN | {"head_dim": 6, "qk_norm": "projection"},
        {"router": TopK("sigmoid", normalize_gates=True, gate_scale=2.5)},
    ),
    "tied": ({"tied_embeddings": True}, {}),
    "documented": (
        {"block": documented_block()},
        {"z_loss_coefficient": 0.1, "router": TopK("sigmoid", bias_update_rate=0.05)},
    ),
    "noisy": ({}, {"router": NoisyTopK()}),
    "groups": ({}, {"router": TopK(num_groups=2, top_groups=1, group_score="top2")}),
    "sinkhorn": ({}, {"router": Sinkhorn()}),
    "expert choice": ({}, {"router": ExpertChoice()}),
    "capped choice": ({}, {"router": ExpertChoice(most_experts=2), "z_loss_coefficient": 0.1}),
    "threshold": ({}, {"router": Threshold()}),
}
"""Settings of the model and of its experts, beside those of GPT-2's shape."""


@dataclass(frozen=True)
class Scattered:
    """A policy of a user's own: any unsorted placement, another one for every other count of any class.

    Peers that counted differently would not place alike, and so their gradients would be wrong in the next iteration.
    """

    name = "scattered"

    def init(self, num_layers, num_classes, num_ranks, slots_per_rank):
        placement, _ = Static().init(num_layers, num_classes, num_ranks, slots_per_rank)
        return placement, jnp.zeros((), jnp.uint32)

    def __call__(self, popularity_LE, placement_LNS, state):
        def mixed(numbers):
            numbers = numbers.astype(jnp.uint32) * jnp.uint32(2654435761)
            return numbers ^ (numbers >> 13)

        def place(popularity_E):
            seed = state + jnp.sum(mixed(popularity_E * 8 + jnp.arange(NUM_CLASSES)), dtype=jnp.uint32)
            order = jnp.argsort(mixed(mixed(seed) + mixed(jnp.arange(placement_LNS[0].size))))
            return ((order + seed) % NUM_CLASSES).astype(jnp.int32)

        return jax.vmap(place)(popularity_LE).reshape(placement_LNS.shape), state + jnp.uint32(1)


class Case(NamedTuple):
    """A plan and its programs, compiled once and run on many inputs."""

    topology: tuple[int, int, int] = (2, 2, 1)
    failed: frozenset = frozenset()
    planner: str = "lockstep"
    microbatches: int = 2
    window: int = 2
    pattern: tuple[bool, ...] = (True,)
    top_k: int = 1
    capacity: Capacity = SlotCapacity(0.7)
    remat: str = "none"
    move_roles: bool = False
    clip_norm: float | None = None
    dtype: str = "float64"
    decoder: str = ""  # one of DECODERS
    cut: Any = None  # of a model with the pattern's layers, which otherwise is that of a stage
    counts: tuple[int, ...] | None = None  # micro-batches of each pipeline
    attention: str = "auto"
    embedding: str = "replicated"
    head: str = "replicated"
    separates: bool = False
    weighs: bool = False  # every token's loss has a weight
    held_by: tuple[tuple[int, ...], ...] | None = None  # stage of each chunk, by pipeline; the cut is then of chunks


def experiment_of(case: Case) -> Experiment:
    """The experiment of a case."""
    _, P, N = case.topology
    return Experiment(
        model=ModelConfig(
            len(case.pattern) * (1 if case.cut else P),
            8,
            2,
            12,
            sequence_length=5,
            moe_pattern=case.pattern,
            **DECODERS[case.decoder][0],
        ),
        experts=ExpertConfig(
            NUM_CLASSES,
            NUM_CLASSES // N + 1,
            case.top_k,
            case.capacity,
            0.05,
            **DECODERS[case.decoder][1],
        ),
        placement=Scattered(),
        topology=Topology(*case.topology),
        data=DataConfig(),
        optimizer=OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=2, clip_norm=case.clip_norm),
        compute_dtype=case.dtype,
        attention=case.attention,
        embedding=case.embedding,
        head=case.head,
        separate_documents=case.separates,
        num_steps=40,
        num_microbatches=case.microbatches,
        microbatches=case.counts,
        window=case.window,
        planner=case.planner,
        remat=case.remat,
        cut=None if case.held_by else case.cut,
        sequences_per_microbatch=2 * N,
    )
