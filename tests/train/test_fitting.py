"""A run that does not fit into memory is told so, by an account that arrays and programs confirm."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from swift.config.experiment import Experiment
from swift.errors import SettingError
from swift.experts.config import ExactCapacity, ExpertConfig
from swift.experts.optimizer import OptimizerConfig
from swift.machine import Room
from swift.mesh.devices import ProgramMemory
from swift.models.config import ModelConfig
from swift.pipeline.reconfigure.memory_account import MemoryAccount
from swift.topology import Topology
from swift.train import fitting
from swift.train.build import make_engine

GB = 10**9
MODEL = ModelConfig(
    num_layers=2, model_dim=32, num_heads=2, ffn_dim=64, sequence_length=32, moe_pattern=(False, True), vocab_size=300
)
EXPERTS = ExpertConfig(num_classes=4, slots_per_rank=2)
SHAPES = {
    "one worker": {"topology": Topology(num_expert_ranks=4), "num_microbatches": 3},
    "virtual": {"topology": Topology(num_expert_ranks=4), "ranks": "virtual"},
    "bfloat16": {"topology": Topology(num_expert_ranks=2), "compute_dtype": "bfloat16"},
    "exact": {
        "topology": Topology(num_expert_ranks=2),
        "experts": ExpertConfig(num_classes=4, slots_per_rank=4, capacity=ExactCapacity()),
    },
    "sharded": {"topology": Topology(num_expert_ranks=4), "embedding": "sharded", "head": "sharded"},
    "pipelines": {"topology": Topology(2, 2, 2), "num_microbatches": 4},
    "window": {"topology": Topology(2, 2, 2), "num_microbatches": 3, "window": 2},
    "host memory": {"topology": Topology(num_expert_ranks=2), "optimizer": OptimizerConfig(memory="pinned_host")},
    "bfloat16 moments": {"topology": Topology(num_expert_ranks=2), "optimizer": OptimizerConfig(moments="bfloat16")},
}


def experiment_of(corpus, name):
    settings = {"model": MODEL, "experts": EXPERTS, "data": corpus, "eval_every": 0, **SHAPES[name]}
    return Experiment(num_steps=40, sequences_per_microbatch=8, **settings)


def account_of(engine):
    live = engine.spec.live
    return MemoryAccount.of(
        engine.spec,
        engine.stash_bytes,
        num_kept=int(engine.steps.main == "window"),
        num_workers=live.num_live,
        num_devices=live.mesh.size,
        share=1.0,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("virtual", "window") else pytest.mark.long, id=name) for name in SHAPES],
)
def test_the_account_is_that_of_arrays_and_of_the_program(corpus, name):
    """State and slots are those of a real state; the compiled program has room for all that shapes tell, and more."""
    engine = make_engine(experiment_of(corpus, name), frozenset(), "none")
    account, state = account_of(engine), engine.spec.init(jax.random.key(0))

    def num_bytes(tree):
        return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)

    copies_of_counters = num_bytes((state.step, state.placement, state.policy))
    assert account.slots == num_bytes(state.slots)
    assert account.state == pytest.approx(num_bytes(replace(state, slots={})), abs=copies_of_counters + 100)
    assert 0 < account.copies < account.slots
    program = engine.steps.memory(engine.steps.main)
    assert program is not None
    after = account.compiled(program, has_host=True)
    assert after.total == account.num_devices * (
        program.arguments + program.results + program.temporary + sum(program.host)
    )
    assert account.by_shape <= after.total
    assert account.by_shape >= 0.5 * after.total


def refused(fit):
    with pytest.raises(SettingError) as error:
        fit.check()
    return str(error.value)


def test_a_line_says_what_takes_how_much_and_what_makes_it_smaller(corpus):
    experiment = experiment_of(corpus, "one worker")
    sizes = {"state": 3 * 10**9, "slots": 2 * 10**9, "gradients": 2 * 10**9, "stashes": 10**9}
    account = MemoryAccount(num_devices=4, copies=10**9, earlier_states=0, **sizes)
    line = refused(fitting.Fit(experiment, account, (Room(6 * GB, 7 * GB, 0, "this machine"),)))
    assert line.startswith(
        "Experiment.ranks = 'emulated': 4 devices take 8.0 GB of memory or more (state 3.0 GB, slots 2.0 GB, "
        "gradients 2.0 GB, stashes 1.0 GB), and this machine has 7.0 GB, of which 6.0 GB are free; less with "
    )
    for setting in ("Experiment.embedding", "Topology.num_expert_ranks", "slots_per_rank", "moments", "sequences_per"):
        assert setting in line
    program = ProgramMemory(arguments=0, results=0, temporary=5 * 10**9 // 2, code=0)
    after = account.compiled(program, has_host=True)
    line = refused(fitting.Fit(experiment, after, (Room(7 * GB, 8 * GB, GB, "this machine"),)))
    assert "4 devices take 10.0 GB of memory (" in line
    assert "other buffers 2.0 GB" in line
    assert "has 8.0 GB, of which 7.0 GB are free, and 1.0 GB of swap" in line


def test_what_others_hold_now_is_warned_of_and_refuses_nobody(corpus):
    """The cache of some file systems counts as held, and so does what a process before this one gives back later."""
    account = MemoryAccount(
        num_devices=4, copies=GB, earlier_states=0, state=5 * GB, slots=5 * GB, gradients=0, stashes=0
    )

    def told(*rooms):
        return fitting.Fit(experiment_of(corpus, "one worker"), account, rooms).check()

    machine, group = Room(3 * GB, 64 * GB, 0, "this machine"), Room(12 * GB, 16 * GB, 0, "its group")
    assert told(machine).startswith("memory may not be enough: 4 devices take 10.0 GB")
    assert "this machine has 64.0 GB, of which 3.0 GB are free" in told(machine, group)
    assert told(group) is None
    assert told(machine._replace(left=GB, size=8 * GB, swap=4 * GB)) is not None  # the swap may be enough
    with pytest.raises(SettingError, match=r"its group has 8\.0 GB"):
        told(machine, group._replace(size=8 * GB))


@pytest.mark.parametrize(
    "sizes", [{"num_shared_experts": 2**18}, {"model_dim": 2**14}, {"ffn_dim": 2**18}, {"vocab_size": 2**20}], ids=str
)
def test_no_parameter_is_made_of_a_model_that_cannot_fit(corpus, monkeypatch, sizes):
    def lists(_):
        pytest.fail("a module was made, with all its parameters")

    monkeypatch.setattr("swift.models.parameters.list_draws", lists)
    monkeypatch.setattr(fitting, "memory_rooms", lambda: (Room(10**8, 10**8, 0, "this machine"),))
    experiment = experiment_of(corpus, "one worker")
    experiment = replace(experiment, model=replace(experiment.model, **sizes))
    with pytest.raises(SettingError, match=r"4 devices take .* and this machine has 100 MB"):
        fitting.check_shapes(experiment, make_engine(experiment, frozenset(), "none"), 1)


def test_devices_with_a_memory_of_their_own_are_asked(corpus, monkeypatch):
    experiment = experiment_of(corpus, "one worker")
    engine = make_engine(experiment, frozenset(), "none")
    stats = {"bytes_limit": 10**5, "bytes_in_use": 10**6}
    device = SimpleNamespace(memory_stats=lambda: stats, device_kind="H100")
    monkeypatch.setattr(fitting, "_devices_here", lambda _: [device] * 4)
    with pytest.raises(SettingError, match=r"4 devices take .* and the set of 4 H100 has 0 MB, of which 0 MB are free"):
        fitting.check_program(experiment, engine, 1)
    stats["bytes_limit"] = 10**9
    assert fitting.check_program(experiment, engine, 1) is None


def test_where_nobody_says_how_much_there_is_nothing_is_compiled(corpus, monkeypatch):
    monkeypatch.setattr(fitting, "memory_rooms", lambda: ())
    experiment = experiment_of(corpus, "one worker")
    engine = make_engine(experiment, frozenset(), "none")
    fitting.check_shapes(experiment, engine, 1)
    assert fitting.check_program(experiment, engine, 1) is None
    assert not engine.steps.is_compiled("single")


def test_processes_of_one_machine_add_up(corpus, monkeypatch):
    """They have what an engine of the whole run has, and two more states."""
    experiment = experiment_of(corpus, "pipelines")
    monkeypatch.setattr(fitting.Fit, "check", lambda fit: fit.account)
    whole, half = (fitting.check_processes(experiment, num_here, 4) for num_here in (4, 2))
    alone = account_of(make_engine(experiment, frozenset(), "none"))
    assert whole == replace(alone, earlier_states=2 * (alone.state + alone.slots))
    assert (half.num_devices, half.state, half.earlier_states) == (4, whole.state // 2, whole.earlier_states // 2)
