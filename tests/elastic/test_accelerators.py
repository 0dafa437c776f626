"""A process's side of a group of accelerators, whose devices and coordination service are made up here."""

from types import SimpleNamespace

import jax
import pytest
from jax._src import xla_bridge

from swift.config.experiment import Experiment
from swift.elastic import jax_group
from swift.elastic.accelerators import AcceleratorGroup, MemberDevices
from swift.elastic.jax_group import JaxGroup, is_aborted
from swift.elastic.worker.worker import WorkerSpec
from swift.errors import RunError, SettingError
from swift.mesh.live import storage_mesh
from swift.train.build import make_plan_settings, make_step_spec, on_storage_mesh


class Service:
    """The client of a coordination service, with which the other processes have published theirs already."""

    def __init__(self, published):
        self.published, self.is_connected = published, False

    def connect(self):
        self.is_connected = True

    def key_value_set(self, key, value):
        assert key not in self.published
        self.published[key] = value

    def blocking_key_value_get(self, key, _timeout_ms):
        return self.published[key]

    def key_value_dir_get_bytes(self, _key):
        return []

    def shutdown(self):
        pass


@pytest.fixture
def group(monkeypatch):
    """Makes the group of member 0 of two, each with two devices, where the hardware numbers this process 1."""
    settings = {}

    def make(platform="gpu", *, local=2, own=1, others=(0,), num_processes=2):
        others_by_key = {f"swift/process_index/{k}": str(index) for k, index in enumerate(others, start=1)}
        service = Service(others_by_key)
        monkeypatch.setattr(jax_group, "_client", lambda *_: service)
        monkeypatch.setattr(jax.config, "update", settings.__setitem__)
        monkeypatch.setattr(jax, "local_device_count", lambda: local)
        monkeypatch.setattr(jax, "process_index", lambda: own)
        monkeypatch.setattr(jax, "process_count", lambda: num_processes)
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=k // 2, id=k) for k in range(4)])
        made = AcceleratorGroup(MemberDevices(platform, (2, 3)), "unix:/nowhere", 0, 2, timeout_s=300)
        made.settings = settings
        return made

    yield make
    state, _, _ = jax_group.jax_internals()
    state.client, state.process_id, state.num_processes, state.coordinator_address = None, 0, 1, None


def test_a_group_of_gpus_has_those_of_its_members_in_their_order(group):
    made = group()
    made.join()
    assert made._client.is_connected
    assert made.settings["jax_platforms"] == "cuda"
    assert made.settings["jax_cuda_visible_devices"] == "2,3"
    assert [[device.id for device in row] for row in made.grid(2)] == [[2, 3], [0, 1]]
    state, _, _ = jax_group.jax_internals()
    assert (state.client, state.process_id, state.num_processes) == (made._client, 0, 2)


def test_on_tpu_a_process_holds_all_chips_of_its_host(group):
    made = group("tpu")
    made.join()
    assert made.settings["jax_platforms"] == "tpu"
    assert "jax_cuda_visible_devices" not in made.settings


def test_jax_has_the_settings_by_which_gpus_are_chosen():
    """As ``jax.distributed.initialize(local_device_ids=...)`` sets them: what its plugin is then given."""
    before = jax.config.jax_platforms
    assert "visible_devices" not in xla_bridge._options_from_jax_configs("cuda")
    MemberDevices("gpu", (1, 2)).configure()
    try:
        assert jax.config.jax_platforms == "cuda"
        assert xla_bridge._options_from_jax_configs("cuda")["visible_devices"] == [1, 2]
    finally:
        jax.config.update("jax_platforms", before)
        jax.config.update("jax_cuda_visible_devices", "all")


@pytest.mark.parametrize(
    ("made_up", "told"),
    [
        ({"local": 1}, "this process has 1 devices, and needs 2"),
        ({"num_processes": 3}, "devices of 3 processes are connected, and those of 2 form a generation"),
        ({"others": (1,)}, "devices of 2 processes are connected"),
    ],
)
def test_other_devices_than_the_run_needs_end_the_process(group, made_up, told):
    """Its death is counted, so that the run ends where that helps nothing: it is not asked to try again."""
    with pytest.raises(RunError, match=told) as error:
        group(**made_up).join()
    assert not is_aborted(error.value)


def test_an_abort_shuts_nothing_down_as_it_would_in_a_group_of_cpus(group, monkeypatch):
    found = []
    monkeypatch.setattr(jax_group, "connections", lambda: found.append("sockets") or [])
    made = group()
    made.join()
    made._is_connected = True
    made.abort()
    assert found == []
    JaxGroup.abort(made)
    assert found == ["sockets"]


@pytest.mark.parametrize("separates", [False, True])
def test_a_process_takes_the_kernel_of_attention_of_its_devices(separates, corpus):
    """It makes its spec and its plans before it has them, where cuDNN's kernel cannot be traced."""
    experiment = Experiment(data=corpus, compute_dtype="bfloat16", separate_documents=separates)
    for devices, kernel in (
        (None, "tiled"),
        (MemberDevices("gpu", (0,)), "triton"),
        (MemberDevices("tpu", (0,)), "splash"),
    ):
        member = WorkerSpec(experiment=experiment, process=None, by_rank=False, scratch=None, devices=devices)
        spec = member.step_specs().on(8)
        assert spec.gpt.kernel == kernel
        assert make_plan_settings(experiment, spec).problem.costs


def test_a_process_that_stores_states_needs_no_device_of_their_kernel(corpus):
    experiment = Experiment(data=corpus, compute_dtype="bfloat16", attention="triton")
    stored = storage_mesh(experiment.topology)
    with pytest.raises(SettingError, match="needs GPUs"):
        make_step_spec(experiment, stored)
    assert make_step_spec(on_storage_mesh(experiment), stored).gpt.kernel == "tiled"
