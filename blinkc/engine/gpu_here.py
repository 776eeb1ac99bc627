"""The GPU and driver of this machine, which plans are bound to; nothing when there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DRIVER_FACTS = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHere:
    """The first GPU that CUDA shows."""

    name: str
    target: str  # sm_90
    driver: str  # 580.95.05, or CUDA 13.0 where the driver does not say more
    free_bytes: int

    @property
    def builds(self) -> dict[str, str]:
        """Return what plans for this GPU must find again when they are loaded."""
        return {"compute capability": f"{self.target[3:-1]}.{self.target[-1]}"} | {
            "driver": self.driver
        }


def find_gpu() -> GpuHere | None:
    """Return the GPU, or None where there is none or cuda-python is missing."""
    try:
        from cuda.bindings import driver as cu

        if int(cu.cuInit(0)[0]) != 0 or int(cu.cuDeviceGetCount()[1]) < 1:
            return None
        device = cu.cuDeviceGet(0)[1]
        kinds = cu.CUdevice_attribute
        major = cu.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = cu.cuDeviceGetAttribute(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        name = cu.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode()
        version = int(cu.cuDriverGetVersion()[1])
        context = cu.cuDevicePrimaryCtxRetain(device)[1]
        cu.cuCtxSetCurrent(context)
        free_bytes = int(cu.cuMemGetInfo()[1])
        cu.cuDevicePrimaryCtxRelease(device)
    except (ImportError, RuntimeError):  # RuntimeError: libcuda.so.1 is not there
        return None
    return GpuHere(
        name=name,
        target=f"sm_{int(major[1])}{int(minor[1])}",
        driver=driver_version(version),
        free_bytes=free_bytes,
    )


def driver_version(cuda_version: int) -> str:
    """Return the driver's full version, or the CUDA version that it serves.

    Args:
        cuda_version: as cuDriverGetVersion gives it, 13000 for CUDA 13.0.
    """
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)*)\b", _DRIVER_FACTS.read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found:
        return found[1]
    return f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
