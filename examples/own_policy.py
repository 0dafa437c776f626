"""Trains with a custom placement policy, and compares it with SYMI's.

    python examples/own_policy.py [RUN_DIR]

A policy is a frozen dataclass with two pure functions that JAX traces: the first placement, and the next one from the
popularity of the experts. E: experts, L: layers, N: ranks, S: slots of a rank.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from train_from_python import EXPERIMENT, run

from swift.experts.placement import place_contiguously, uniform_placement
from swift.runlog import read_run, scalars


def square_root(popularity_E: jax.Array, num_slots: int) -> jax.Array:
    """Gives each expert one replica, and the others in proportion to the square root of its popularity."""
    root_E = jnp.sqrt(popularity_E.astype(jnp.float32)) + 1e-6
    ends_E = jnp.round(jnp.cumsum(root_E) / jnp.sum(root_E) * (num_slots - popularity_E.size)).astype(jnp.int32)
    return 1 + jnp.diff(ends_E, prepend=0)


@dataclass(frozen=True)
class SquareRoot:
    """A policy that follows popularity less closely than SYMI does."""

    name = "square root"

    def init(self, num_layers: int, num_classes: int, num_ranks: int, slots_per_rank: int) -> tuple[jax.Array, tuple]:
        """Places the experts evenly, before their popularity is known."""
        return uniform_placement(num_layers, num_classes, num_ranks, slots_per_rank), ()

    def __call__(self, popularity_LE: jax.Array, placement_LNS: jax.Array, state: tuple) -> tuple[jax.Array, tuple]:
        """Places the experts for the next iteration."""
        return place_contiguously(square_root, popularity_LE, placement_LNS), state


def main() -> None:
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/square-root")
    run(replace(EXPERIMENT, placement=SquareRoot()), run_dir)
    dropped_T = scalars(read_run(run_dir), "drop_fraction")
    print(f"square root: {dropped_T.mean():.1%} of the tokens dropped, {dropped_T[-10:].mean():.1%} in the end")


if __name__ == "__main__":
    main()
