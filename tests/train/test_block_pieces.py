"""The pieces that each of several hosts has of a state whose workers hold other blocks than a checkpoint's stages."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from swift.checkpoint.array_files import reserve_arrays, write_arrays
from swift.checkpoint.manifest import array_digest
from swift.checkpoint.multi_host_save import stored_shapes, verify_ranges, write_ranges
from swift.checkpoint.snapshots import begin_snapshot
from swift.config.experiment import Experiment
from swift.data.config import DataConfig
from swift.data.sources import TextFiles
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure import transfer
from swift.topology import Topology
from swift.train.build import make_step_spec
from swift.train.checkpointer import begin_block_pieces
from swift.train.saved_state import split_of, to_store

EXPERIMENT = Experiment(
    model=ModelConfig(
        num_layers=4, model_dim=12, num_heads=2, ffn_dim=9, sequence_length=8, moe_pattern=(False, True, True, True)
    ),
    experts=ExpertConfig(num_classes=3, slots_per_rank=2),
    topology=Topology(2, 2, 2),
    data=DataConfig(source=TextFiles("*")),
    num_microbatches=2,
)
APART, TWO_RUNS = {"cut": ((1, 3), (2, 2)), "microbatches": (1, 3)}, {"planner": "v"}


def with_moments(state):
    """A state whose moments are not zero, and not its weights."""

    def of_weights(path, leaf):
        groups = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return leaf + (len(str(path)) * state.master[groups[0]] if groups else 7)

    return replace(state, moments=jax.tree_util.tree_map_with_path(of_weights, state.moments))


@pytest.mark.parametrize("changes", [APART, TWO_RUNS], ids=["apart", "two runs"])
@pytest.mark.parametrize("num_hosts", [1, 2, 4])
@pytest.mark.parametrize("chosen", [[0, 1, 2], [2, 0]], ids=["all experts", "some"])
def test_hosts_give_together_what_one_does(tmp_path, monkeypatch, changes, num_hosts, chosen):
    """Hosts have whole pipelines, stages of all, or a worker each, which divide what they all have."""
    spec = make_step_spec(replace(EXPERIMENT, **changes))
    split, chosen_LK = split_of(spec), np.tile(chosen, (3, 1))
    state = with_moments(spec.init(jax.random.key(0)))
    theirs = begin_snapshot(split, *to_store(spec, state), chosen_LK)()

    order = {device: number for number, device in enumerate(spec.live.mesh.devices.flat)}
    monkeypatch.setattr(
        transfer,
        "_processes",
        lambda devices: frozenset(order[device] * num_hosts // len(order) for device in devices),
    )
    pieces = []
    for own in range(num_hosts):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_index", lambda own=own: own)
            begun = begin_block_pieces(split, spec, state, chosen_LK)
        pieces.append(begun())
    arrays = tmp_path / "arrays"
    reserve_arrays(arrays, stored_shapes(split, chosen_LK), write_arrays)
    filled = [write_ranges(arrays, split, chosen_LK, of_host, lambda: None) for of_host in pieces]
    found = [verify_ranges(arrays, split, chosen_LK, filled, own, lambda: None) for own in range(num_hosts)]
    for one in found[1:]:
        found[0].adopt(one.to_json())
    assert found[0].dense == {name: array_digest([array]) for name, array in theirs.dense.items() if array.size}
    assert found[0].units == {unit: array_digest(of_unit.values()) for unit, of_unit in theirs.experts()}
    assert min(one.num_bytes for one in filled) > 0.15 * sum(one.num_bytes for one in filled) / num_hosts
