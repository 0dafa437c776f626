"""No extra bytes: what a whole compiled iteration exchanges is the closed form, and no placement changes it."""

import jax
import pytest

from swift.experts import ExpertConfig, exchange_bytes
from swift.experts.placement import MinMax, Static, Symi
from swift.mesh import collective_bytes
from swift.models import ModelConfig
from swift.pipeline import lone_step, put_batch
from swift.topology import Topology
from swift.train import Experiment

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize(
    "policy", [Symi(), *(pytest.param(other, marks=pytest.mark.slow) for other in (Static(), MinMax()))]
)
def test_bytes_of_an_iteration(policy):
    ranks, slots = 4, 2
    experiment = Experiment(
        model=ModelConfig(2, 16, 2, 24, 8, (False, True)),
        experts=ExpertConfig(4, slots),
        placement=policy,
        topology=Topology(num_expert_ranks=ranks),
        sequences_per_microbatch=8,
    )
    program = experiment.program()
    state = program.init(jax.random.key(0))
    batch = put_batch(experiment.loader("train").batch(0), program.live)
    measured = collective_bytes(lone_step(program).lower(state, batch).compile().as_text(), ranks)

    groups = program.gpt.groups.values()
    weights = sum(exchange_bytes(g.num_rows, ranks, slots if g.is_expert else 1, g.size, itemsize=4) for g in groups)
    rows = ranks * slots * experiment.experts.rows_per_slot(2 * 8, ranks)
    tokens = 4 * ranks * rows * 16 * 4  # to the experts and back, forward and backward, one MoE layer
    assert measured.pop("all-to-all") == weights + tokens
    # Metadata: popularity, drops and sums, a few numbers a rank.
    assert measured.keys() == {"all-reduce"}
    assert measured["all-reduce"] < 1000
