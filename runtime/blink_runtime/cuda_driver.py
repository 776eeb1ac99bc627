"""The CUDA driver as the loader uses it: names, flags -> checked calls that raise `BlinkError`.

Objects own what they hold: `close()` or `with`. Nothing here knows of models.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from blinkc.closing import Closing
from blinkc.errors import BlinkError


def driver() -> Any:
    """Return cuda.bindings.driver; BlinkError when cuda-python is missing."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise BlinkError(
            f"cuda-python cannot be imported: {error}", hint="pip install 'blinkc[cuda]'"
        ) from None
    return module


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return what a driver call returned next to its code.

    Raises:
        BlinkError: the code is not success; names the code and `what` was being done.
    """
    code = result[0]
    if int(code) != 0:
        raise BlinkError(f"{what}: {getattr(code, 'name', code)}")
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Facts of the GPU that kernels and the loader are fitted to."""

    name: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    total_bytes: int
    driver_version: int  # 13000 for CUDA 13.0
    gpu_direct_rdma_writes_ordering: int

    @property
    def target(self) -> str:
        """Return the name of the compile target, e.g. sm_90."""
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"


class Context(Closing):
    """The primary context of one GPU, current in the thread that made it."""

    def __init__(self, ordinal: int = 0) -> None:
        cu = driver()
        try:
            check(cu.cuInit(0), "starting the CUDA driver")
        except RuntimeError as error:  # libcuda.so.1 is not there
            raise BlinkError(
                f"no CUDA driver: {error}",
                hint="run on a machine with an NVIDIA GPU and its driver",
            ) from None
        count = check(cu.cuDeviceGetCount(), "counting GPUs")
        if ordinal >= count:
            raise BlinkError(
                f"GPU {ordinal} asked for, {count} found", hint="check CUDA_VISIBLE_DEVICES"
            )
        self._device = check(cu.cuDeviceGet(ordinal), "opening the GPU")
        self._context = check(cu.cuDevicePrimaryCtxRetain(self._device), "making a context")
        check(cu.cuCtxSetCurrent(self._context), "making the context current")
        self.spec = self._read_spec()

    def _read_spec(self) -> DeviceSpec:
        cu = driver()
        attribute = cu.CUdevice_attribute

        def read(name: str) -> int:
            return int(check(cu.cuDeviceGetAttribute(getattr(attribute, name), self._device), name))

        return DeviceSpec(
            name=check(cu.cuDeviceGetName(128, self._device), "naming the GPU")
            .split(b"\0")[0]
            .decode(),
            compute_capability=(
                read("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
                read("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
            ),
            num_multiprocessors=read("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
            total_bytes=int(check(cu.cuDeviceTotalMem(self._device), "sizing the GPU")),
            driver_version=int(check(cu.cuDriverGetVersion(), "asking for the driver's version")),
            gpu_direct_rdma_writes_ordering=read(
                "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"
            ),
        )

    def make_current(self) -> None:
        """Make the context current in the calling thread."""
        check(driver().cuCtxSetCurrent(self._context), "making the context current")

    def synchronize(self) -> None:
        """Wait for all work of the context; must not be called beside a resident scheduler."""
        check(driver().cuCtxSynchronize(), "waiting for the GPU")

    def free_bytes(self) -> int:
        """Return the free device memory."""
        return int(check(driver().cuMemGetInfo(), "asking for free memory")[0])

    def close(self) -> None:
        """Give the primary context back."""
        if self._context is not None:
            driver().cuDevicePrimaryCtxRelease(self._device)
            self._context = None


class DeviceBuffer:
    """Device memory, freed by `close()`."""

    def __init__(self, num_bytes: int, what: str) -> None:
        self.num_bytes = num_bytes
        self.address = int(
            check(
                driver().cuMemAlloc(max(num_bytes, 16)), f"allocating {num_bytes} bytes for {what}"
            )
        )

    def fill(self, byte: int = 0) -> None:
        """Set every byte; returns when done."""
        check(driver().cuMemsetD8(self.address, byte, max(self.num_bytes, 16)), "filling memory")

    def write(self, data: bytes | memoryview, offset: int = 0) -> None:
        """Copy host bytes in; returns when done."""
        source = memoryview(data).cast("B")
        if offset + len(source) > self.num_bytes:
            raise ValueError(f"{len(source)} bytes at {offset} do not fit {self.num_bytes}")
        pointer = (ctypes.c_char * len(source)).from_buffer_copy(source)
        check(
            driver().cuMemcpyHtoD(self.address + offset, ctypes.addressof(pointer), len(source)),
            "copying to the GPU",
        )

    def read(self, num_bytes: int | None = None, offset: int = 0) -> bytes:
        """Copy out to the host."""
        count = self.num_bytes - offset if num_bytes is None else num_bytes
        data = ctypes.create_string_buffer(count)
        check(
            driver().cuMemcpyDtoH(ctypes.addressof(data), self.address + offset, count),
            "copying from the GPU",
        )
        return data.raw

    def close(self) -> None:
        """Free the memory."""
        if self.address:
            driver().cuMemFree(self.address)
            self.address = 0


class MappedBuffer:
    """Pinned host memory that the GPU reads and writes in place."""

    def __init__(self, num_bytes: int, what: str) -> None:
        cu = driver()
        self.num_bytes = num_bytes
        flags = cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE
        self.host_address = int(
            check(cu.cuMemHostAlloc(num_bytes, flags), f"pinning {num_bytes} bytes for {what}")
        )
        self.address = int(
            check(cu.cuMemHostGetDevicePointer(self.host_address, 0), "mapping pinned memory")
        )
        ctypes.memset(self.host_address, 0, num_bytes)

    @property
    def view(self) -> memoryview:
        """Return the bytes, writable."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.host_address)).cast(
            "B"
        )

    def close(self) -> None:
        """Free the memory; no view of it may be used afterwards."""
        if self.host_address:
            driver().cuMemFreeHost(self.host_address)
            self.host_address = 0


class Function:
    """A kernel of a module."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name
        self._shared_limit = 32 * 1024  # with the static part a kernel has 48 KiB without asking

    def allow_shared(self, num_bytes: int) -> None:
        """Raise the limit of dynamic shared memory to `num_bytes` where it is lower."""
        if num_bytes <= self._shared_limit:
            return
        cu = driver()
        name = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            cu.cuFuncSetAttribute(self.handle, name, num_bytes),
            f"{num_bytes} bytes of shared memory for kernel {self.name}",
        )
        self._shared_limit = num_bytes


class Module:
    """A loaded cubin."""

    def __init__(self, image: bytes, name: str) -> None:
        self.name = name
        self._handle = check(driver().cuModuleLoadData(image), f"loading module {name}")
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """Look a kernel up by its name."""
        if name not in self._functions:
            handle = check(
                driver().cuModuleGetFunction(self._handle, name.encode()),
                f"kernel {name} of module {self.name}",
            )
            self._functions[name] = Function(handle, name)
        return self._functions[name]

    def global_address(self, name: str) -> tuple[int, int]:
        """Return address and size in bytes of a `__device__` variable."""
        address, size = check(
            driver().cuModuleGetGlobal(self._handle, name.encode()), f"variable {name}"
        )
        return int(address), int(size)

    def read_uint32(self, name: str) -> int:
        """Return the value of a 4-byte `__device__` variable."""
        return self._read(name, 4)

    def read_uint64(self, name: str) -> int:
        """Return the value of an 8-byte `__device__` variable."""
        return self._read(name, 8)

    def _read(self, name: str, num_bytes: int) -> int:
        address, _ = self.global_address(name)
        data = (ctypes.c_char * num_bytes)()
        check(driver().cuMemcpyDtoH(ctypes.addressof(data), address, num_bytes), f"reading {name}")
        return int.from_bytes(data.raw, "little")

    def close(self) -> None:
        """Unload."""
        if self._handle is not None:
            driver().cuModuleUnload(self._handle)
            self._handle = None


class Stream:
    """A stream that does not wait for the default one."""

    def __init__(self) -> None:
        cu = driver()
        self.handle = check(
            cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING), "making a stream"
        )

    def synchronize(self) -> None:
        """Wait until the stream is empty."""
        check(driver().cuStreamSynchronize(self.handle), "waiting for a stream")

    def close(self) -> None:
        """Destroy the stream."""
        if self.handle is not None:
            driver().cuStreamDestroy(self.handle)
            self.handle = None


class Event:
    """A point in a stream, with a time."""

    def __init__(self) -> None:
        self._handle = check(driver().cuEventCreate(0), "making an event")

    def record(self, stream: Stream) -> None:
        """Mark the stream's present end."""
        check(driver().cuEventRecord(self._handle, stream.handle), "recording an event")

    def synchronize(self) -> None:
        """Wait for what was before the mark; returns at once where none was made."""
        check(driver().cuEventSynchronize(self._handle), "waiting for an event")

    def milliseconds_since(self, earlier: Event) -> float:
        """Wait for this event and return the time from `earlier` to it."""
        check(driver().cuEventSynchronize(self._handle), "waiting for an event")
        return float(
            check(driver().cuEventElapsedTime(earlier._handle, self._handle), "reading the time")
        )
