"""The rendered scheduler compiles and links for GPUs that this machine does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blinkc.codegen.compile_cuda import compile_cuda
from blinkc.codegen.render_scheduler import render_scheduler
from blinkc.engine.cuda_source import CudaNeeds, compile_kernels, render_cuda_source
from blinkc.errors import BlinkError
from tests.codegen.plans import make_plan

KERNELS = (
    "blink_scheduler_init",
    "blink_scheduler_step",
    "blink_scheduler_idle",
    "blink_scheduler_persistent",
    "blink_scheduler_host_step",
)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_it_links(architecture: str) -> None:
    """Guards the device side of every placement, with NVRTC, nvJitLink and libcudadevrt alone."""
    plan = replace(make_plan(), target=architecture)
    cubin = compile_cuda(render_scheduler(plan, architecture), architecture)
    assert cubin[:4] == b"\x7fELF"
    for kernel in KERNELS:
        assert f".text.{kernel}".encode() in cubin, kernel
    assert b"blink_scheduler_state_bytes" in cubin
    assert b"cudaGraphLaunch" in cubin  # resolved from libcudadevrt


def test_a_wrong_architecture_is_named() -> None:
    """Guards the message for a typo in --target."""
    with pytest.raises(BlinkError, match="sm90"):
        compile_cuda({"a.cu": ""}, "sm90")
    with pytest.raises(BlinkError, match="sm_11"):
        compile_cuda({"a.cu": ""}, "sm_11")


def test_a_compiler_error_carries_its_log() -> None:
    """Guards the log in the error."""
    with pytest.raises(BlinkError) as caught:
        compile_cuda({"broken.cu": "__global__ void k() { missing(); }"}, "sm_90a")
    assert "missing" in caught.value.log


def test_an_unresolved_symbol_carries_the_linkers_log() -> None:
    """Guards against a cubin that would fail only when the GPU loads it."""
    source = 'extern "C" __device__ void nowhere(); __global__ void k() { nowhere(); }'
    with pytest.raises(BlinkError) as caught:
        compile_cuda({"unresolved.cu": source}, "sm_90a")
    assert "nowhere" in caught.value.log


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_120a"])
def test_kernels_compile_for_other_gpus(architecture: str) -> None:
    """Guards against instructions of one GPU outside of their #if: clusters, early launches."""
    needs = CudaNeeds(dtype="fp16", heads=((64, 4),), logits_dtype="fp32", activation="silu")
    cubin = compile_kernels(render_cuda_source(needs), architecture)
    for kernel in ("sample_rows", "prefill_attention_64", "finish_step"):
        assert f".text.{kernel}".encode() in cubin, kernel
