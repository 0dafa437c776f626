"""Emulated devices: N CPU devices in one process, so that every parallel program runs on a laptop."""

import os

import jax

# Emulated devices share the host's cores, so a thread may wait long for its turn in a collective; XLA's default
# time-outs (20 s and 40 s) would abort the process.
PATIENCE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


class EmulationError(RuntimeError):
    """Emulated devices were requested after JAX had started with fewer."""


def _devices_set() -> int:
    return jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]


def emulate_devices(num_devices: int) -> None:
    """Makes JAX run on ``num_devices`` emulated CPU devices; call it before any other use of JAX.

    Calling it again for at most as many devices does nothing.

    Args:
        num_devices: smallest number of devices that ``jax.devices()`` will list.

    Raises:
        EmulationError: JAX has started already, on another platform or with fewer devices.
    """
    present = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in PATIENCE_FLAGS if flag.split("=")[0] not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()
    try:
        jax.config.update("jax_num_cpu_devices", max(num_devices, _devices_set()))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) < num_devices:
            raise EmulationError(
                f"cannot emulate {num_devices} devices: JAX has already started with {len(devices)} "
                f"{devices[0].platform} device(s); call emulate_devices before anything else uses JAX"
            ) from None
