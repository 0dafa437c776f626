"""The platform of a launched run: what is refused there, and the devices that each process is given."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift.cli import child_entry
from swift.cli.nodes import Nodes, Platform, ProcessCommands
from swift.cli.options import command_line
from swift.config.experiment import Experiment
from swift.config.stored import config_text
from swift.deadlines import Deadlines
from swift.elastic import device_probe
from swift.elastic.device_probe import JaxAnswer, ask_jax
from swift.elastic.membership.messages import processes_of
from swift.elastic.state.run_files import RunFiles
from swift.elastic.worker import worker
from swift.errors import SettingError
from swift.experts.config import ExpertConfig
from swift.topology import Topology

GPUS = JaxAnswer("gpu", 4, "NVIDIA H100")


@pytest.fixture
def experiment(corpus):
    return Experiment(experts=ExpertConfig(num_classes=4, slots_per_rank=4), topology=Topology(2, 1, 2), data=corpus)


@pytest.mark.parametrize(
    ("arguments", "platform"),
    [
        ("", Platform(None, "live", "next")),
        ("--platform cpu --recovery restart --prepare none", Platform(None, "restart", "none")),
        ("--platform gpu", Platform("gpu", "restart", "none")),
        ("--platform tpu --recovery restart --prepare none", Platform("tpu", "restart", "none")),
    ],
)
def test_the_platform_decides_what_was_not_said(experiment, arguments, platform):
    options = command_line().parse_args(["launch", "--processes", "2", "some.gin", *arguments.split()])
    assert Platform.of(options.platform, experiment, options.recovery, options.prepare) == platform


@pytest.mark.parametrize("ranks", ["emulated", "devices"])
def test_accelerators_are_held_whether_or_not_the_experiment_would_emulate_them(experiment, ranks):
    assert Platform.of("gpu", replace(experiment, ranks=ranks), None, None).accelerator == "gpu"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"recovery": "live"}, "--recovery = 'live': must be 'restart' with --platform gpu"),
        ({"prepare": "next"}, "--prepare = 'next': must be 'none' with --platform gpu"),
        ({"ranks": "virtual"}, "Experiment.ranks = 'virtual': are ranks of one device"),
        ({"adapt": "auto"}, "Experiment.adapt = 'auto': must be 'reroute' with --platform gpu"),
        ({"name": "cpu", "ranks": "devices"}, "Experiment.ranks = 'devices': must be 'emulated' with --platform cpu"),
    ],
)
def test_what_a_platform_cannot_do_is_refused(experiment, given, told):
    of_experiment = {name: given[name] for name in ("ranks", "adapt") if name in given}
    with pytest.raises(SettingError) as error:
        Platform.of(
            given.get("name", "gpu"),
            replace(experiment, **of_experiment),
            given.get("recovery"),
            given.get("prepare"),
        )
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "found", "chips", "here", "each", "told"),
    [
        ("gpu", GPUS, (), 2, 2, None),
        ("gpu", GPUS, (), 5, 1, "needs 5 on this machine, one for each expert rank, and JAX has 4 x NVIDIA H100 there"),
        ("gpu", GPUS, (), 3, 2, "needs 6 on this machine, one for each expert rank, and JAX has 4"),
        (
            "gpu",
            JaxAnswer("cpu", 1, "cpu"),
            (),
            1,
            1,
            "needs GPUs, and JAX uses the cpu there: see swift doctor",
        ),
        ("gpu", JaxAnswer(None, error="no driver"), (), 1, 1, "needs GPUs, and JAX does not start (no driver) there"),
        ("tpu", None, ("accel0", "accel1"), 1, 2, None),
        ("tpu", None, ("accel0",), 2, 1, "needs a process for each host, which holds all its chips; here are 2"),
        ("tpu", None, (), 1, 1, "needs TPU chips, and there are none"),
    ],
)
def test_a_node_without_the_devices_of_its_processes_is_refused(name, found, chips, here, each, told):
    def ask():
        assert found is not None, "JAX on a host of a slice would wait for the others"
        return found

    platform = Platform(name, "restart", "none")
    if told is None:
        platform.check_node(here, each, ask, lambda: chips)
        return
    with pytest.raises(SettingError) as error:
        platform.check_node(here, each, ask, lambda: chips)
    assert str(error.value).startswith(f"--platform = '{name}': {told}")


def test_nobody_is_asked_for_devices_on_cpus():
    Platform(None, "live", "next").check_node(99, 9, pytest.fail, pytest.fail)


@pytest.mark.parametrize(
    ("stub", "answer"),
    [
        ('print(\'["gpu", 4, "NVIDIA H100"]\')', GPUS),
        ("raise SystemExit('no driver')", JaxAnswer(None, error="no driver")),
        ("import os; os.kill(os.getpid(), 9)", JaxAnswer(None, error="exit code -9")),
    ],
)
def test_jax_is_asked_in_another_process(monkeypatch, stub, answer):
    monkeypatch.setattr(device_probe, "_ASK", stub)
    assert ask_jax() == answer


def devices_of(platform, topology, num_nodes, *, by_rank):
    """The options of the members that concern devices, as their processes read them."""
    processes = processes_of(topology, by_rank=by_rank)
    commands = ProcessCommands(
        scratch=RunFiles(Path("files"), Path("memory")),
        processes=processes,
        nodes=Nodes(num_nodes),
        by_rank=by_rank,
        memory_checkpoint_every=1,
        forming_s=600.0,
        platform=platform,
        devices_per_process=1 if by_rank else topology.num_expert_ranks,
    )
    members = [command_line().parse_args(commands.worker(process)[3:]) for process in processes]
    assert [(member.pipeline, member.stage, member.rank) for member in members] == [
        (*process.worker, process.rank) for process in processes
    ]
    assert {member.forming for member in members} == {600.0}
    return [(member.platform, member.device) for member in members]


def test_each_process_holds_the_gpus_of_its_place_on_its_node():
    topology = Topology(2, 2, 2)
    assert devices_of("gpu", topology, 1, by_rank=False) == [("gpu", [2 * k, 2 * k + 1]) for k in range(4)]
    assert devices_of("gpu", topology, 2, by_rank=False) == [("gpu", [0, 1]), ("gpu", [2, 3])] * 2
    assert devices_of("gpu", topology, 2, by_rank=True) == [("gpu", [k]) for k in range(4)] * 2
    assert devices_of(None, topology, 1, by_rank=False) == [(None, [])] * 4


SUPERVISOR = """
import sys
from pathlib import Path
import jax
from jax._src import xla_bridge
from swift.cli.options import command_line
from swift.cli.launch import LaunchJob
from swift.elastic.state.run_files import RunFiles
from swift.elastic import device_probe as devices

devices._ASK = "print('[\\"gpu\\", 4, \\"stub\\"]')"
words = ["launch", "--processes", "2", sys.argv[1], "--platform", "gpu", "--deadline", "forming=600"]
job = LaunchJob.of(command_line().parse_args(words))
assert not xla_bridge.backends_are_initialized()
job.storage(Path(sys.argv[2]))
assert not xla_bridge.backends_are_initialized()
assert "--forming=600.0" in job.commands(RunFiles(Path("files"), Path("memory"))).worker(job.processes[0])
print(jax.config.jax_platforms, job.platform.accelerator)
"""


@pytest.mark.slow
def test_the_supervisor_makes_no_backend_but_that_of_the_cpu(tmp_path, experiment):
    """A GPU or TPU belongs to the first process that initialises it."""
    (tmp_path / "some.gin").write_text(config_text(experiment))
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "some.gin"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-2:] == ["cpu", "gpu"]


def test_processes_on_accelerators_have_more_time_and_stay_on_the_loopback_device_of_one_node():
    gpu, cpu = Platform("gpu", "restart", "none"), Platform(None, "live", "next")
    assert gpu.environment({"HOME": "here"}, 1) == {"HOME": "here", "NCCL_SOCKET_IFNAME": "lo"}
    assert gpu.environment({"NCCL_SOCKET_IFNAME": "eth1"}, 1) == {"NCCL_SOCKET_IFNAME": "eth1"}
    assert gpu.environment({}, 2) == cpu.environment({}, 1) == {}
    assert gpu.deadlines.forming > cpu.deadlines.forming
    assert gpu.deadlines.dying > cpu.deadlines.dying
    assert cpu.deadlines == Deadlines()


@pytest.mark.parametrize("forming_s", [0.5, 150.0, 600.0])
def test_no_process_gives_up_before_the_run_does(monkeypatch, forming_s):
    """Whatever ``--deadline forming`` is: it would take the blame for another whose device does not answer."""
    waits, made = [], SimpleNamespace(run=lambda _: None)
    monkeypatch.setattr(worker, "AcceleratorGroup", lambda *arguments: waits.append(arguments[-1]))
    monkeypatch.setattr(child_entry, "load_experiment", lambda _: SimpleNamespace(topology=Topology(2, 1, 2)))
    monkeypatch.setattr(child_entry, "configure_jax", lambda *_: None)
    monkeypatch.setattr(child_entry, "wait_to_begin", lambda *_: SimpleNamespace(done=0))
    monkeypatch.setattr(worker, "WorkerProcess", lambda spec, _: (spec.group("unix:/nowhere", 0, 2), made)[1])
    options = ["worker", "files", "memory", f"--forming={forming_s}", "--platform=gpu", "--device=0", "0", "0", "0"]
    child_entry.worker(command_line().parse_args(options))
    (timeout_s,) = waits
    assert isinstance(timeout_s, int)
    assert timeout_s > forming_s


def test_ranks_of_a_tpu_process_are_its_devices():
    tpu = Platform("tpu", "restart", "none")
    for devices_per_process in (4, 8):
        tpu.check_node(1, devices_per_process, chips=lambda: tuple("abcd"))
    with pytest.raises(SettingError, match=r"num_expert_ranks = 2: .* 4 chips are here"):
        tpu.check_node(1, 2, chips=lambda: tuple("abcd"))
