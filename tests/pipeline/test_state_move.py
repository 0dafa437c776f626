"""A state moves between devices by programs that were compiled before, which move what has to be moved and no more."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from swift.config.experiment import Experiment
from swift.experts.config import ExpertConfig
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure import compiled_steps
from swift.pipeline.reconfigure.recut import Recut, recut_spec
from swift.pipeline.reconfigure.transfer import DeviceTransfer, LayerRange, merged, transfer_on_host
from swift.topology import Topology
from swift.train.build import make_engine
from tests.pipeline.held_rows import rows_of

FAILED = frozenset({(0, 1)})


@contextmanager
def compilations(caplog):
    """The messages about programs that this thread compiles in the block; none of them was compiled before."""
    jax.clear_caches()
    caplog.clear()
    told = []
    with jax.log_compiles():
        yield told
    told += [message for message in caplog.messages if "Finished XLA compilation" in message]


def given(before, state, after, moved):
    """The bytes that live workers hold of a state, and that they did not hold before."""
    rows = zip(after.live.workers, rows_of(after, moved), strict=True)
    held = dict(zip(before.live.workers, rows_of(before, state), strict=True))
    return sum(len(value) for worker, row in rows for key, value in row.items() if key not in held.get(worker, {}))


def test_a_prepared_move_compiles_nothing_and_moves_the_same_as_one_that_is_not(rig, caplog):
    """To a pipeline with all blocks, whose stacks are longer than those of the others, and back to short ones."""
    shape = {"topology": (2, 2, 1), "pattern": (False, True, True, False), "cut": (2, 2)}
    with jax.enable_x64(True):
        one = rig(**shape)
        home, rerouted = one.spec, rig(**shape, failed=[(0, 1)]).spec
        alone = recut_spec(home, Recut(((4, 0), (2, 2)), (1, 3))).at(rerouted.live)
        state, _ = DeviceTransfer(home, rerouted)(one.start(one.draw(0)))
        for before, after in ((rerouted, alone), (alone, rerouted), (rerouted, alone), (alone, home)):
            prepared = DeviceTransfer(before, after)
            with compilations(caplog) as told:
                prepared.prepare()
            assert len(told) > 0
            with compilations(caplog) as told:
                moved, num_bytes = prepared(state)
            assert told == []
            other, also = DeviceTransfer(before, after)(state)
            assert rows_of(after, moved) == rows_of(after, other)
            assert num_bytes == also
            if after is not home:  # who returns also gets an embedding or head that it does not use
                assert num_bytes == given(before, state, after, moved)
            have = {key: value for row in rows_of(before, state) for key, value in row.items()}
            assert all(value == have[key] for row in rows_of(after, moved) for key, value in row.items())
            state = moved


def test_layers_and_whole_stacks_that_the_same_plan_takes_are_told_apart(rig, caplog):
    """A worker's own stack becomes half as long, and it gives the layers that another one had left with it."""
    shape = {"topology": (2, 4, 1), "pattern": (True,) * 8, "cut": (2, 2, 2, 2)}
    with jax.enable_x64(True):
        one = rig(**shape)
        home = one.spec
        away, back = (rig(**shape, failed=failed).spec for failed in ([(0, 2), (0, 3)], [(0, 3)]))
        long = recut_spec(home, Recut(((4, 4, 0, 0), (2, 2, 2, 2)), (1, 3))).at(away.live)
        state, _ = DeviceTransfer(away, long)(DeviceTransfer(home, away)(one.start(one.draw(0)))[0])
        prepared = DeviceTransfer(long, back)
        prepared.prepare()
        with compilations(caplog) as told:
            moved, _ = prepared(state)
        assert told == []
        have = {key: value for row in rows_of(long, state) for key, value in row.items()}
        assert all(value == have[key] for row in rows_of(back, moved) for key, value in row.items())


def trivial(spec, table, **options):
    """A program that costs nothing to compile."""
    del spec, table, options
    return jax.jit(lambda state, *_: (state, {}))


@pytest.fixture
def without_experts(monkeypatch):
    monkeypatch.setattr(compiled_steps, "barrier_step", trivial)
    monkeypatch.setattr(compiled_steps, "evaluation_step", trivial)
    return Experiment(
        model=ModelConfig(2, 16, 2, 64, sequence_length=8, moe_pattern=(False,)),
        experts=ExpertConfig(num_classes=1),
        topology=Topology(2, 2, 1),
        num_microbatches=4,
        sequences_per_microbatch=2,
        adapt="recut",
    )


def random_state(spec):
    shapes, random = spec.abstract(with_slots=True), np.random.default_rng(0)
    host = jax.tree.map(lambda leaf: random.integers(9, size=leaf.shape).astype(leaf.dtype), shapes)
    return host, spec.live.put(host, spec.specs)


def test_a_cut_whose_move_cannot_be_prepared_is_found_and_told_as_not_prepared(without_experts, monkeypatch):
    def fail(move):
        raise MemoryError(f"no room for {type(move).__name__}")

    with make_engine(without_experts, FAILED, "none") as engine:
        monkeypatch.setattr(DeviceTransfer, "prepare", fail)
        better = engine.better_cut(FAILED)
        assert better is not None
        assert engine.background_errors() == ["the move to a better cut: no room for DeviceTransfer"]
        _, told = engine.reconfigure(random_state(engine.spec)[1], FAILED, better.recut)
        assert not told.prepared


def test_a_run_without_experts_prepares_the_move_to_a_better_cut_and_the_way_back(without_experts, caplog):
    with make_engine(without_experts, FAILED, "next") as engine:
        spec = engine.spec
        (host, state), better = random_state(spec), engine.better_cut(FAILED)
        assert better is not None
        with compilations(caplog) as told:
            state, there = engine.reconfigure(state, FAILED, better.recut)
            on_host = transfer_on_host(host, spec, engine.spec)
            jax.tree.map(np.testing.assert_array_equal, on_host, jax.device_get(state))
            engine.settle()
            _, back = engine.reconfigure(state, frozenset())
        assert told == []
        assert there.prepared
        assert back.prepared
        assert min(there.moved_bytes, back.moved_bytes) > 0


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(0, 1, False), (0, 2, False)], [(0, 1, 3, False)]),
        ([(0, 1, False), (0, 1, False)], [(0, 1, 2, False), (0, 1, 2, False)]),
        ([(0, 1, False), (1, 2, False)], [(0, 1, 2, False), (1, 2, 3, False)]),
        ([(0, 0, True), (0, 0, True), (0, 0, False)], [(0, 0, 2, True), (0, 0, 1, False)]),
        ([(0, 0, True), (0, 1, False)], [(0, 0, 1, True), (0, 1, 2, False)]),
    ],
)
def test_consecutive_layers_of_a_worker_are_one_piece(pieces, expected):
    found = merged([LayerRange(worker, slice(at, at + 1), is_padding) for worker, at, is_padding in pieces])
    assert [(one.worker, one.layers.start, one.layers.stop, one.is_padding) for one in found] == expected
