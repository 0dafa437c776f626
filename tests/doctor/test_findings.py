"""Signs that a machine gives, made up here, and the finding of `swift doctor` that each has to lead to."""

import importlib.metadata
import os

import pytest

from swift.doctor.checks import examine_directory, examine_machine, examine_network, judge_packages
from swift.elastic.device_probe import DeviceEvidence, JaxAnswer, examine_devices, judge_devices

CPU, GPU = JaxAnswer("cpu", 1, "cpu"), JaxAnswer("gpu", 2, "NVIDIA H100")
TPU = JaxAnswer("tpu", 4, "TPU v5 lite")
TWO = ("nvidia0", "nvidia1")
CUDA13, CUDA12, LIBTPU = {"jax-cuda13-plugin": "0.10.2"}, {"jax-cuda12-plugin": "0.10.2"}, {"libtpu": "0.0.40"}


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (DeviceEvidence(CPU), "ok", "CPU alone: devices are emulated"),
        (DeviceEvidence(CPU, plugins=CUDA13), "note", "a container has to be started with its devices"),
        (DeviceEvidence(GPU, TWO, "580.65.06", plugins=CUDA13), "ok", "2 x NVIDIA H100, driver 580.65.06"),
        (DeviceEvidence(TPU, tpu=("accel0",), plugins=LIBTPU), "ok", "4 x TPU v5 lite"),
        (DeviceEvidence(CPU, TWO), "missing", "2 NVIDIA GPUs, but NVIDIA's kernel module is not loaded"),
        (DeviceEvidence(CPU, TWO, "580.65.06"), "missing", "no plugin for them: pip install 'jax[cuda13]'"),
        (DeviceEvidence(CPU, TWO, "575.51.03", plugins=CUDA13), "missing", "too old for jax-cuda13-plugin"),
        (DeviceEvidence(GPU, TWO, "575.51.03", plugins=CUDA12), "ok", "driver 575.51.03"),
        (DeviceEvidence(CPU, TWO, "580.65.06", plugins=CUDA13), "missing", "JAX_PLATFORMS"),
        (DeviceEvidence(CPU, tpu=("accel0",)), "missing", "1 TPU chips, but JAX has no plugin"),
        (DeviceEvidence(CPU, tpu=("accel0",), plugins=LIBTPU), "missing", "another process may hold the chips"),
        (DeviceEvidence(CPU, tpu=("0",)), "ok", "CPU alone"),
        (DeviceEvidence(JaxAnswer(None, error="no such library")), "missing", "JAX does not start: no such library"),
        (
            DeviceEvidence(JaxAnswer(None, error="AssertionError"), asked="cuda"),
            "missing",
            "JAX does not start with JAX_PLATFORMS = 'cuda': AssertionError",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_and_drivers(found, verdict, text):
    (finding,) = judge_devices(found)
    assert finding.verdict == verdict
    assert text in finding.text


def test_signs_are_found_in_the_files_of_the_kernel(tmp_path, monkeypatch):
    """The driver's version is that of the proprietary module and of the open one, which word it differently."""
    monkeypatch.setattr("swift.elastic.device_probe.ask_jax", lambda: CPU)
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Mon Sep 11 19:00:00 UTC 2021",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  470.82.01  Release Build  (dvs-builder@U16)",
    ):
        version.write_text(line)
        (finding,) = examine_devices(tmp_path)
        assert finding.text.startswith("1 NVIDIA GPUs, but JAX has no plugin")
    monkeypatch.setattr("swift.elastic.device_probe._installed", CUDA13.items)
    (finding,) = examine_devices(tmp_path)
    assert "470.82.01 is too old" in finding.text


NEEDS = ["jax<0.13,>=0.10", "numpy<3,>=2.2", 'torch>=2; extra == "peers"']


@pytest.mark.parametrize(
    ("installed", "texts"),
    [
        ({"jax": "0.10.2", "numpy": "2.4.6"}, [("ok", "jax 0.10.2, numpy 2.4.6")]),
        ({"jax": "0.9.1", "numpy": "2.4.6"}, [("missing", "jax is 0.9.1: pip install 'jax<0.13,>=0.10'")]),
        ({"numpy": "3.0"}, [("missing", "jax is not installed"), ("missing", "numpy is 3.0")]),
    ],
)
def test_packages_are_held_against_the_versions_that_were_tested(installed, texts):
    def version_of(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    findings = list(judge_packages(NEEDS, version_of))
    assert [finding.verdict for finding in findings] == [verdict for verdict, _ in texts]
    assert all(text in finding.text for finding, (_, text) in zip(findings, texts, strict=True))


def machine(root, **files):
    """Findings by topic, on a machine of a gigabyte whose control group has some files."""
    for name, text in {"proc/meminfo": "MemTotal: 1000000 kB\n", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {finding.topic: finding for finding in examine_machine(root)}


def test_the_limits_of_a_container_are_told(tmp_path):
    limits = {"sys__fs__cgroup__cpu.max": "50000 100000\n", "sys__fs__cgroup__memory.max": "512000000\n"}
    found = machine(tmp_path, **limits)
    assert (found["cores"].verdict, found["cores"].text.partition(", ")[2][:26]) == (
        "note",
        "of which this container ma",
    )
    assert found["memory"].text == "512 MB, this container's limit"
    assert found["shm"].text.startswith(f"there is no {tmp_path / 'dev/shm'}")


def test_the_limit_of_a_control_group_above_is_told(tmp_path):
    groups = {"proc__self__cgroup": "0::/pod/one\n", "sys__fs__cgroup__pod__memory.max": "256000000\n"}
    assert machine(tmp_path, **groups)["memory"].text == "256 MB, this container's limit"


def test_a_machine_without_limits(tmp_path):
    limits = {"sys__fs__cgroup__cpu.max": "max 100000\n", "sys__fs__cgroup__memory.max": "max\n"}
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    found = machine(tmp_path, **limits)
    assert (found["cores"].verdict, found["memory"].text) == ("ok", "1.0 GB")
    assert found["shm"].text.endswith(f"free in {tmp_path / 'dev/shm'}") == (found["shm"].verdict == "ok")


def test_a_directory_that_works_is_left_as_it_was(tmp_path):
    (finding,) = examine_directory(tmp_path / "not" / "yet")
    assert finding.verdict == "ok"
    assert finding.text.startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    point = str(tmp_path / "my runs").replace(" ", "\\040")
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/x rw\n23 22 0:40 / {point} rw shared:7 - nfs4 server:/runs rw\n")
    (tmp_path / "my runs").mkdir()
    (finding,) = examine_directory(tmp_path / "my runs", root=tmp_path)
    assert (finding.verdict, ": nfs4, " in finding.text) == ("note", True)
    (finding,) = examine_directory(tmp_path, root=tmp_path)
    assert (finding.verdict, ": ext4, " in finding.text) == ("ok", True)


@pytest.mark.parametrize(
    ("call", "fault", "text"),
    [
        ("replace_file", OSError(30, "Read-only file system"), "cannot replace files: Read-only file system"),
        ("sync_directory", OSError(22, "Invalid argument"), "cannot rename directories: Invalid argument"),
    ],
)
def test_a_directory_in_which_a_run_would_fail(tmp_path, monkeypatch, call, fault, text):
    def fail(*_):
        raise fault

    monkeypatch.setattr(f"swift.doctor.checks.{call}", fail)
    (finding,) = examine_directory(tmp_path)
    assert (finding.verdict, text in finding.text) == ("missing", True)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_nobody_may_write_to(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    (finding,) = examine_directory(tmp_path)
    assert finding.text == f"{tmp_path} cannot be written to: Permission denied"


def test_a_file_system_that_stalls_is_given_up(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr("swift.doctor.checks.replace_file", lambda *_: os.read(reader, 1))
    (finding,) = examine_directory(tmp_path, deadline_s=0.1)
    assert (finding.verdict, "does not answer" in finding.text) == ("missing", True)
    os.write(writer, b"1")


def test_a_clock_that_the_file_system_does_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr("swift.doctor.checks.time.time", lambda: 1e9)
    _, finding = examine_directory(tmp_path)
    assert (finding.topic, finding.verdict) == ("clock", "note")
    assert "s ahead of this machine's" in finding.text


@pytest.mark.parametrize(
    ("is_alone", "is_chosen", "verdict"), [(True, False, "note"), (False, False, "missing"), (False, True, "note")]
)
def test_an_address_that_only_this_machine_reaches(is_alone, is_chosen, verdict):
    (finding,) = examine_network("127.0.0.1", is_alone=is_alone, is_chosen=is_chosen)
    assert finding.verdict == verdict


def test_an_address_of_another_machine():
    (finding,) = examine_network("192.0.2.1", is_alone=False, is_chosen=True)
    assert (finding.verdict, "cannot be listened on" in finding.text) == ("missing", True)
