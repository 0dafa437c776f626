"""Finds the GPUs and TPUs of this machine and their drivers, and checks whether JAX can use them.

Each result is a ``Finding``, which ``swift doctor`` shows as one line.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "note", "missing"]
"""``ok``: as it should be. ``note``: may cost speed, or concerns only some runs. ``missing``: prevents a run."""
_TOPIC = "devices"
_ASK = """
import json, jax
print(json.dumps([jax.default_backend(), jax.local_device_count(), jax.devices()[0].device_kind]))
"""
_START_S = 180
"""Time limit for JAX to find its devices, in seconds."""
OLDEST_DRIVER = {"jax-cuda13-plugin": 580, "jax-cuda12-plugin": 525}
"""Oldest major driver version for the CUDA version of each plugin, from NVIDIA's minor version compatibility table."""
_PLUGINS = (*OLDEST_DRIVER, "libtpu")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+)((?:\.\d+)+)")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: subject of the check, in one word.
        verdict: whether what was found is as it should be.
        text: what was found and, if that is not as it should be, what to do.
    """

    topic: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class JaxAnswer:
    """The devices that JAX reports in a process of its own.

    Attributes:
        platform: default backend: cpu, gpu or tpu; None if JAX did not start.
        count: number of devices on this machine.
        kind: device kind, as JAX names it.
        error: why JAX did not start, in one line.
    """

    platform: str | None
    count: int = 0
    kind: str = ""
    error: str = ""


@dataclass(frozen=True)
class DeviceEvidence:
    """Signs of accelerators on a machine.

    Attributes:
        jax: devices that JAX reports.
        nvidia: device files of NVIDIA GPUs.
        driver: version of NVIDIA's kernel module; None if it is not loaded.
        tpu: device files that may be TPU chips.
        plugins: versions of the installed JAX plugins for accelerators, by package name.
        asked: value of ``JAX_PLATFORMS``; empty if JAX chooses.
    """

    jax: JaxAnswer
    nvidia: tuple[str, ...] = ()
    driver: str | None = None
    tpu: tuple[str, ...] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    asked: str = ""


def examine_devices(root: Path = Path("/")) -> Iterator[Finding]:
    """Looks for accelerators on this machine, starts JAX, and yields the findings.

    Args:
        root: root of the file system.
    """
    yield from judge_devices(
        DeviceEvidence(
            jax=ask_jax(),
            nvidia=_files(root / "dev", r"nvidia\d+"),
            driver=_driver(root / "proc/driver/nvidia/version"),
            tpu=tpu_chips(root),
            plugins=dict(_installed()),
            asked=os.environ.get("JAX_PLATFORMS", ""),
        )
    )


def judge_devices(evidence: DeviceEvidence) -> Iterator[Finding]:
    """Yields findings on whether JAX can use the accelerators of the machine."""
    faults = [*_nvidia_faults(evidence), *_tpu_faults(evidence)]
    yield from (Finding(_TOPIC, "missing", text) for text in faults)
    if evidence.jax.platform is None:
        asked = f" with JAX_PLATFORMS = {evidence.asked!r}" if evidence.asked else ""
        yield Finding(_TOPIC, "missing", f"JAX does not start{asked}: {evidence.jax.error}")
        return
    if not faults:
        yield from _sound(evidence)


def _sound(evidence: DeviceEvidence) -> Iterator[Finding]:
    if evidence.jax.platform != "cpu":
        driver = f", driver {evidence.driver}" if evidence.driver and evidence.jax.platform == "gpu" else ""
        yield Finding(_TOPIC, "ok", f"{evidence.jax.count} x {evidence.jax.kind}{driver}")
    elif evidence.plugins:
        plugins = ", ".join(evidence.plugins)
        text = f"CPU alone, though {plugins} is installed: a container has to be started with its devices"
        yield Finding(_TOPIC, "note", text)
    else:
        yield Finding(_TOPIC, "ok", "CPU alone: devices are emulated")


def _nvidia_faults(evidence: DeviceEvidence) -> Iterator[str]:
    if not evidence.nvidia:
        return
    gpus, plugins = f"{len(evidence.nvidia)} NVIDIA GPUs", [name for name in evidence.plugins if name in OLDEST_DRIVER]
    if evidence.driver is None:
        yield f"{gpus}, but NVIDIA's kernel module is not loaded: install its driver"
    elif not plugins:
        yield f"{gpus}, but JAX has no plugin for them: pip install 'jax[cuda13]'"
    else:
        version, least = int(evidence.driver.partition(".")[0]), min(OLDEST_DRIVER[name] for name in plugins)
        if version < least:
            yield f"the driver {evidence.driver} is too old for {plugins[0]}, which needs {least} or newer"
        elif evidence.jax.platform == "cpu":
            yield f"{gpus}, driver and plugin, but JAX uses the CPU: see the environment variable JAX_PLATFORMS"


def _tpu_faults(evidence: DeviceEvidence) -> Iterator[str]:
    # A file in /dev/vfio may be any device that is passed through to a virtual machine: it counts as a TPU only if
    # libtpu is installed.
    is_tpu = any("accel" in path for path in evidence.tpu) or (evidence.tpu and "libtpu" in evidence.plugins)
    if is_tpu and not evidence.nvidia and evidence.jax.platform != "tpu":
        chips = f"{len(evidence.tpu)} TPU chips"
        if "libtpu" not in evidence.plugins:
            yield f"{chips}, but JAX has no plugin for them: pip install 'jax[tpu]'"
        elif evidence.jax.platform == "cpu":
            yield f"{chips} and libtpu, but JAX uses the CPU: another process may hold the chips"


def tpu_chips(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns device files that may be TPU chips, below the root of a file system."""
    return _files(root / "dev", r"accel\d+") or _files(root / "dev/vfio", r"\d+")


def _files(directory: Path, pattern: str) -> tuple[str, ...]:
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return tuple(sorted(name for name in names if re.fullmatch(pattern, name)))


def _driver(path: Path) -> str | None:
    match = _DRIVER.search(path.read_text()) if path.is_file() else None
    return None if match is None else match[1] + match[2]


def _installed() -> Iterator[tuple[str, str]]:
    for name in _PLUGINS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def ask_jax() -> JaxAnswer:
    """Starts JAX in a process of its own, since JAX may crash, hang, or hold on to the devices."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _ASK], **pipes)
    try:
        out, err = process.communicate(timeout=_START_S)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait for its death: a driver may prevent it
        return JaxAnswer(None, error=f"it has no devices after {_START_S} s; another process may hold them")
    try:
        platform, count, kind = json.loads(out.splitlines()[-1])
        return JaxAnswer(str(platform), int(count), str(kind))
    except (IndexError, ValueError):
        lines = err.strip().splitlines()
        return JaxAnswer(None, error=lines[-1][:300] if lines else f"exit code {process.returncode}")
