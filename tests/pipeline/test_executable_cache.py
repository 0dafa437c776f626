"""Compiled programs as files: made once, loaded by whoever runs the same, never trusted when damaged."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swift.experts.config import SlotCapacity
from swift.pipeline.reconfigure import executables
from swift.pipeline.reconfigure.compiled_steps import Steps, program_key
from swift.pipeline.reconfigure.configuration import Configurator, PlanSettings
from swift.pipeline.reconfigure.executables import ExecutableCache
from swift.schedules.problem import Problem
from swift.topology import Topology

SUM = PartitionSpec("worker")


pytestmark = pytest.mark.usefixtures("no_cache")  # as in the processes of a run


class Counted:
    """A small program with a collective, and how often it was compiled."""

    def __init__(self):
        self.mesh, self.times = Mesh(np.array(jax.devices()[:2]), ("worker",)), 0
        self.sharding = NamedSharding(self.mesh, SUM)
        self.devices = list(self.mesh.devices.flat)

    def __call__(self):
        self.times += 1
        summed = jax.shard_map(lambda tree: jax.lax.psum(tree, "worker"), mesh=self.mesh, in_specs=SUM, out_specs=SUM)
        rows = {"b": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=self.sharding)}
        return jax.jit(lambda scale, tree: {"a": summed(tree)["b"] * scale}).lower(2.0, rows).compile()

    def check(self, program):
        rows = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), self.sharding)
        np.testing.assert_array_equal(program(2.0, {"b": rows})["a"], [[6, 10, 14]] * 2)


@pytest.fixture
def counted():
    return Counted()


def test_a_program_is_compiled_once_and_computes_the_same_when_it_is_loaded(counted, tmp_path):
    for _ in range(2):
        store = ExecutableCache(tmp_path / "programs")
        counted.check(store.get(("sum", 2), counted, counted.devices))
        assert ("sum", 2) in store
    assert counted.times == 1
    store.get(("sum", 3), counted, counted.devices)
    assert counted.times == 2


@pytest.mark.parametrize("damage", [lambda whole: whole[:-5], lambda whole: whole[:999] + b"\0" + whole[1000:]])
def test_a_damaged_program_is_compiled_anew(counted, tmp_path, damage):
    store = ExecutableCache(tmp_path)
    store.get("sum", counted, counted.devices)
    (file,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
    file.write_bytes(damage(file.read_bytes()))
    counted.check(store.get("sum", counted, counted.devices))
    assert counted.times == 2
    counted.check(store.get("sum", counted, counted.devices))
    assert counted.times == 2


def test_of_many_that_ask_at_once_one_compiles(counted, tmp_path):
    store = ExecutableCache(tmp_path)
    threads = [threading.Thread(target=store.get, args=("sum", counted, counted.devices)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.times == 1


def test_a_process_that_is_killed_while_it_compiles_holds_nobody_up(counted, tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from swift.pipeline.reconfigure.executables import ExecutableCache\n"
        "ExecutableCache(Path(sys.argv[1])).get('sum', lambda: [print('compiling', flush=True), time.sleep(1000)], [])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout.readline() == "compiling\n"
        os.kill(process.pid, signal.SIGKILL)
    counted.check(ExecutableCache(tmp_path).get("sum", counted, counted.devices))
    assert counted.times == 1


@contextmanager
def frozen_writer(directory):
    """Has every lock there is, as a process that is stopped in the midst of compiling."""
    with os.scandir(directory) as there:
        locks = [open(one.path, "r+") for one in there if one.name.endswith(".lock")]  # noqa: SIM115
    assert locks
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    for lock in locks:
        lock.close()


def test_what_is_there_is_read_whoever_has_the_lock(counted, tmp_path):
    store = ExecutableCache(tmp_path, patience_s=1000)
    store.get("sum", counted, counted.devices)
    with frozen_writer(tmp_path):
        counted.check(store.get("sum", counted, counted.devices))
    assert counted.times == 1


def test_who_has_waited_long_enough_for_a_frozen_process_compiles_itself(counted, tmp_path):
    store = ExecutableCache(tmp_path, patience_s=0.2)
    store.get("sum", counted, counted.devices)
    next(path for path in tmp_path.iterdir() if path.suffix != ".lock").unlink()
    with frozen_writer(tmp_path):
        counted.check(store.get("sum", counted, counted.devices))
        counted.check(store.get("sum", counted, counted.devices))
    assert counted.times == 2


def test_who_waits_has_the_program_as_soon_as_it_is_there(counted, tmp_path):
    store = ExecutableCache(tmp_path / "programs", patience_s=1000)
    store.get("sum", counted, counted.devices)
    (made,) = (path for path in (tmp_path / "programs").iterdir() if path.suffix != ".lock")
    shutil.move(made, tmp_path / "made")
    got = []
    with frozen_writer(tmp_path / "programs"):
        waiting = threading.Thread(target=lambda: got.append(store.get("sum", counted, counted.devices)))
        waiting.start()
        (tmp_path / "made").rename(made)
        waiting.join(30)
    counted.check(*got)
    assert counted.times == 1


@pytest.mark.long
@pytest.mark.usefixtures("compiled_well")
def test_the_steps_of_a_pipeline_are_found_in_the_store(rig, tmp_path, monkeypatch):
    one = rig(
        topology=(2, 1, 1), failed=frozenset(), window=1, pattern=(False,), dtype="float32", capacity=SlotCapacity(None)
    )
    drawn, losses = one.draw(0), []
    for _ in range(2):
        steps = Steps(one.spec, one.configuration, 2, ExecutableCache(tmp_path))
        state, metrics = steps.run_single(one.start(drawn), steps.on_devices(drawn.batches))
        losses.append(jax.device_get(metrics["loss"]))
        # The second time nothing is lowered, nor compiled.
        monkeypatch.setattr(Steps, "_function", None)
    np.testing.assert_array_equal(*losses)
    assert int(jax.device_get(state.step)[0]) == 1


def test_the_steps_of_a_group_are_on_its_devices_and_keep_the_state(rig):
    one, found = rig(topology=(2, 1, 1), window=1, pattern=(False,), dtype="float32", capacity=SlotCapacity(None)), []
    configuration = replace(one.configuration, device_rows=(1, 0))
    devices_RN = np.array(jax.devices()[2:4]).reshape(2, 1)
    store = SimpleNamespace(get=lambda key, _, devices: found.append((key, devices)))
    steps = Steps.of_processes(one.spec, configuration, devices_RN, 2, store)
    steps.compiled(steps.main)
    key = program_key(configuration, 1, steps.main, keep_state=True)
    assert found == [(key, [jax.devices()[3], jax.devices()[2]])]


def test_a_store_that_cannot_be_written_or_read_costs_nobody_its_program(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(executables, "replace_file", full)
    monkeypatch.setattr(executables, "_serialized", lambda made, **_: made)
    monkeypatch.setattr(executables, "_loaded", lambda content, _: content)
    store = ExecutableCache(tmp_path / "programs")
    assert store.get("sum", lambda: b"compiled", []) == b"compiled"
    assert "for other processes: [Errno 28] No space left on device" in capsys.readouterr().err
    assert "sum" not in store
    shutil.rmtree(tmp_path / "programs")  # not even a lock can be made
    (tmp_path / "programs").write_text("")
    assert store.get("sum", lambda: b"compiled", []) == b"compiled"


def test_where_there_are_no_locks_whoever_needs_a_program_compiles_it(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(executables, "_serialized", lambda made, **_: made)
    monkeypatch.setattr(executables, "_loaded", lambda content, _: content)
    assert ExecutableCache(tmp_path).get("sum", lambda: b"compiled", []) == b"compiled"
    assert ExecutableCache(tmp_path).get("sum", lambda: b"another", []) == b"compiled"


def test_processes_of_a_run_plan_for_a_failure_once(tmp_path, monkeypatch):
    settings, store = PlanSettings(Problem(Topology(3, 2), 2, num_iterations=2)), ExecutableCache(tmp_path)
    planned = Configurator(settings, store).configure(frozenset({(1, 1)}))
    monkeypatch.setattr(Configurator, "_plan", None)
    found = Configurator(settings, store).configure(frozenset({(0, 1)}))  # the same problem, another worker
    assert found.pipeline_D != planned.pipeline_D
    for length, plan in planned.plans.items():
        assert found.plans[length].schedule.problem == plan.schedule.problem
        np.testing.assert_array_equal(found.plans[length].schedule.start, plan.schedule.start)
        np.testing.assert_array_equal(found.plans[length].table.opcode_TR, plan.table.opcode_TR)
    with pytest.raises(TypeError):  # nobody has planned for this one
        Configurator(settings, store).configure(frozenset({(0, 0)}))
