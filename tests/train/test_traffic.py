"""No extra bytes: what a whole compiled iteration exchanges is the closed form, and no placement changes it."""

import re

import jax
import pytest

from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig, RankCapacity, SlotCapacity
from swift.experts.placement.packed import MinMax, Packed
from swift.experts.placement.policy import Static
from swift.experts.placement.symi import Symi
from swift.experts.weight_exchange import exchange_bytes
from swift.mesh.hlo_collectives import collective_bytes
from swift.models.config import ModelConfig
from swift.pipeline.step.single_worker import put_batch, single_worker_step
from swift.topology import Topology
from swift.train.build import make_loader, make_step_spec


@pytest.mark.parametrize(
    ("policy", "capacity"),
    [
        (Symi(), SlotCapacity()),
        pytest.param(Static(), SlotCapacity(), marks=pytest.mark.slow),
        pytest.param(MinMax(), SlotCapacity(), marks=pytest.mark.slow),
        pytest.param(Packed(), RankCapacity(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_of_an_iteration(policy, capacity):
    ranks, slots = 4, 2
    experiment = Experiment(
        model=ModelConfig(2, 16, 2, 24, 8, (False, True)),
        experts=ExpertConfig(4, slots, capacity=capacity),
        placement=policy,
        topology=Topology(num_expert_ranks=ranks),
        sequences_per_microbatch=8,
    )
    spec = make_step_spec(experiment)
    state = spec.init(jax.random.key(0))
    batch = put_batch(make_loader(experiment, "train").batch(0), spec.live)
    measured = collective_bytes(single_worker_step(spec).lower(state, batch).compile().as_text(), ranks)

    groups = spec.gpt.groups.values()
    weights = sum(exchange_bytes(g.num_layers, ranks, slots if g.is_expert else 1, g.size, itemsize=4) for g in groups)
    rows = capacity.rows_sent(experiment.experts, 2 * 8, ranks)
    tokens = 4 * ranks * rows * 16 * 4  # to the experts and back, forward and backward, one MoE layer
    assert measured.pop("all-to-all") == weights + tokens
    # Metadata: popularity, drops and sums, a few numbers a rank.
    assert measured.keys() == {"all-reduce"} | ({"all-gather"} if isinstance(capacity, RankCapacity) else set())
    assert sum(measured.values()) < 1000


@pytest.mark.parametrize(
    ("compute", "wire", "types"), [("float32", "bfloat16", ["f32", "bf16"]), ("bfloat16", "float32", ["bf16", "f32"])]
)
def test_rows_travel_in_the_compute_type_and_their_gradients_in_that_of_the_wire(compute, wire, types):
    """As the program says before it is compiled: XLA:CPU widens bfloat16. Buffers have a request from each rank."""
    experiment = Experiment(
        model=ModelConfig(1, 20, 2, 24, 8, (True,)),
        experts=ExpertConfig(4, 2),
        topology=Topology(num_expert_ranks=4),
        compute_dtype=compute,
        wire_dtype=wire,
        embedding="sharded",
        sequences_per_microbatch=8,
    )
    spec = make_step_spec(experiment)
    batch = put_batch(make_loader(experiment, "train").batch(0), spec.live)
    text = single_worker_step(spec).lower(spec.abstract(with_slots=True), batch).as_text()
    assert re.findall(r"all_to_all.*: \(tensor<4x1x20x(\w+)>\)", text) == types
