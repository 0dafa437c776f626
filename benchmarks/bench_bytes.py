"""Bytes on the wire of one iteration, read from the compiled program, against the closed form of SYMI, section 3."""

import math
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from measure import Trainee, demo, publish

from swift.experts.placement.flexmoe import FlexMoE
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.experts.weight_exchange import exchange_bytes
from swift.mesh.hlo_collectives import collectives

ITEMSIZE = 4


def closed_form(trainee: Trainee) -> dict[str, int]:
    """Returns the bytes of an iteration: weights and gradients of each group, and tokens to experts and back, twice."""
    experiment, gpt, ranks = trainee.experiment, trainee.spec.gpt, trainee.spec.live.num_ranks
    slots = experiment.experts.slots_per_rank
    exchange = {
        name: exchange_bytes(group.num_layers, ranks, slots if group.is_expert else 1, group.size, ITEMSIZE)
        for name, group in gpt.groups.items()
    }
    local_tokens = experiment.tokens_per_step // experiment.num_microbatches // ranks
    rows = experiment.experts.capacity.rows_sent(experiment.experts, local_tokens, ranks)
    tokens = 4 * trainee.spec.num_moe_layers * ranks * rows * experiment.model.model_dim * ITEMSIZE
    return {"experts": exchange.pop("expert"), "dense": sum(exchange.values()), "tokens": tokens}


def measured(trainee: Trainee) -> dict[str, int]:
    """Sums the bytes of collectives in the compiled iteration by kind, counting every iteration of a loop."""
    compiled, ranks = trainee.step.lower(trainee.state, trainee.batches[0]).compile(), trainee.spec.live.num_ranks
    total: Counter[str] = Counter()
    for one in collectives(compiled.as_text(), ranks):
        total[one.kind] += one.num_bytes * ranks * math.prod(loop.num_trips or 1 for loop in one.loops)
    return dict(total)


def migration(trainee: Trainee) -> dict[str, Any]:
    """Counts the bytes that move with a slot (its master weights and two moments), by broadcast and point to point."""
    leaves = jax.tree_util.tree_leaves_with_path((trainee.state.master, trainee.state.moments))
    carried = [leaf for path, leaf in leaves if jax.tree_util.DictKey("expert") in path]
    one_move = sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in carried)
    moves, steps = [], 40
    for _ in range(steps):
        before = np.asarray(trainee.state.placement)
        trainee()
        moves.append(int((before != np.asarray(trainee.state.placement)).sum()))
    moved = [count for count in moves if count]
    average = sum(moved) / max(1, len(moved))
    return {
        "migrating_iterations": f"{len(moved)} of {steps}",
        "slots_moved_on_average": round(average, 1),
        "bytes_of_one_move_point_to_point": one_move,
        "bytes_of_a_migration_point_to_point": round(average * one_move),
        "bytes_of_a_migration_as_broadcasts": round(average * one_move * trainee.spec.live.num_ranks),
    }


def main() -> int:
    symi, static = Trainee(demo(Symi(), "decoupled")), Trainee(demo(Static(), "decoupled"))
    coupled, flexmoe = Trainee(demo(Static(), "coupled")), Trainee(demo(FlexMoE(10), "coupled"))
    form, found = closed_form(symi), measured(symi)
    return publish(
        "bytes of one iteration, demo model, all ranks together",
        {
            "closed_form": form,
            "symi": found,
            "static": measured(static),
            "static_coupled": measured(coupled),
            "flexmoe_with_one_move": measured(flexmoe),
            "flexmoe_migration": migration(flexmoe),
        },
        {"bytes beside the closed form": (abs(found["all-to-all"] - sum(form.values())), 0)},
    )


if __name__ == "__main__":
    sys.exit(main())
