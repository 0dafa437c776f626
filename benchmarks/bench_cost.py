"""Cost of adaptive placement: CPU-seconds per iteration against the baselines, run in turns in one process.

Prints SYMI's policy over a static placement in the same optimizer layout, over DeepSpeed's coupled layout, the ratio
of FlexMoE iterations with and without migration, and the share of the placement computation alone.
"""

import argparse
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from measure import Trainee, cost_of, demo, median, paired_costs, publish, ratio

from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.packed import MinMax
from swift.experts.placement.policy import PlacementPolicy, Static
from swift.experts.placement.replicas import changed_slots
from swift.experts.placement.symi import Symi
from swift.mesh.per_rank import SHARED

PLACEMENTS_PER_CALL = 200
DEMO_SEQUENCES, PAPER_SEQUENCES = 16, 128  # 256 tokens per rank, and the 2,048 of SYMI's evaluation


def flexmoe_costs(rounds: int) -> dict[str, Any]:
    """Measures CPU-seconds of iterations that migrate and of those that do not."""
    trainee = Trainee(demo(FlexMoE(10), "coupled"))
    costs: dict[bool, list[float]] = {True: [], False: []}
    moves = []
    for _ in range(20):
        trainee()
    for _ in range(10 * rounds):
        before = np.asarray(trainee.state.placement)
        cost = cost_of(trainee)
        moved = int(changed_slots(before, np.asarray(trainee.state.placement)))
        costs[moved > 0].append(cost)
        moves += [moved] if moved else []
    normal, migrating = median(costs[False]), median(costs[True])
    return {
        "normal_cpu_s": normal,
        "migrating_cpu_s": migrating,
        "migrating_over_normal": round(migrating / normal, 3),
        "median_slots_moved": median(moves),
        "paper_migrating_over_normal": [2.46, 4.10],
    }


def placement_cost(policy: PlacementPolicy, trainee: Trainee) -> float:
    """Measures CPU-seconds to compute one iteration's placement on all ranks, with popularity from training."""
    experiment, live = trainee.experiment, trainee.spec.live
    popularity_XLE = jnp.stack([trainee()["popularity"][0, 0] for _ in range(8)])
    shape = (popularity_XLE.shape[1], experiment.experts.num_classes, live.num_ranks, experiment.experts.slots_per_rank)

    def many(popularity_XLE: jax.Array) -> jax.Array:
        def one(i: jax.Array, carry: Any) -> Any:
            turn = i + carry[0][0, 0, 0]  # so that no placement can be skipped or hoisted out of the loop
            return policy(popularity_XLE[turn % len(popularity_XLE)], *carry)

        return lax.fori_loop(0, PLACEMENTS_PER_CALL, one, policy.init(*shape))[0]

    run = jax.jit(live.per_rank(many, (SHARED,), SHARED))
    recorded = live.put(np.asarray(popularity_XLE)[None], SHARED)
    jax.block_until_ready(run(recorded))
    return statistics.median(cost_of(lambda: run(recorded)) for _ in range(9)) / PLACEMENTS_PER_CALL


def iteration_costs(num_sequences: int, rounds: int) -> dict[str, Any]:
    """Measures CPU-seconds per iteration of three programs, in turns, and the ratios of SYMI's to the others'."""
    trainees = {
        "symi": Trainee(demo(Symi(), "decoupled", num_sequences)),
        "static": Trainee(demo(Static(), "decoupled", num_sequences)),
        "static_coupled": Trainee(demo(Static(), "coupled", num_sequences)),
    }
    for trainee in trainees.values():
        for _ in range(4):
            trainee()
    costs = paired_costs(dict(trainees), rounds)
    experiment = trainees["symi"].experiment
    return {
        "tokens_per_rank": experiment.tokens_per_step // experiment.topology.num_expert_ranks,
        "cpu_s": {name: median(values) for name, values in costs.items()},
        "symi_over_static_coupled": ratio(costs, "symi", "static_coupled"),
        "symi_over_static": ratio(costs, "symi", "static"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    rounds = parser.parse_args().rounds
    small, paper = iteration_costs(DEMO_SEQUENCES, rounds), iteration_costs(PAPER_SEQUENCES, rounds)
    trainee = Trainee(demo(Symi(), "decoupled"))
    placement = {p.name: placement_cost(p, trainee) for p in (Symi(), MinMax(), FlexMoE(1))}
    return publish(
        "cost of adaptive placement, demo model",
        {
            "rounds": rounds,
            "iteration_of_the_demo": small,
            "iteration_with_the_paper's_tokens_per_rank": paper,
            "placement_cpu_s": {name: round(cost, 7) for name, cost in placement.items()},
            "flexmoe": flexmoe_costs(max(4, rounds // 5)),
        },
        {
            "symi over static, coupled": (paper["symi_over_static_coupled"]["median"], 1.05),
            "symi over static, same layout": (paper["symi_over_static"]["median"], 1.03),
            "placement's share of the demo's iteration": (round(placement["symi"] / small["cpu_s"]["symi"], 5), 0.0005),
            "symi over static, coupled, the demo's tokens per rank": (small["symi_over_static_coupled"]["median"], 1.2),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
