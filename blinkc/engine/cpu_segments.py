"""Run segments alone on the `cpu` engine: segments -> one shared object -> numpy in and out."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import blinkc
from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.codegen.environment import render_template
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.render_cpu import (
    SegmentsContext,
    member_names,
    packed_member,
    segment_text,
    weight_uses,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from blinkc.engine.program import Program
    from blinkc.surgery.segments import Segment

    Array = npt.NDArray[Any]

_C_TYPES = {"fp32": "float", "int32": "int32_t", "bool": "bool"}
_NUMPY_TYPES: dict[str, Any] = {"fp32": np.float32, "int32": np.int32, "bool": np.bool_}


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryText:
    """One segment's entry: where its buffers lie in the pointer array."""

    name: str
    plain: tuple[tuple[str, str, int], ...]  # member, C++ type, index
    packed: tuple[tuple[str, int, int, int, bool], ...]  # member, index, n, k, transposed


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksContext:
    """What segment_checks.cpp.jinja is filled with."""

    version: str
    segments: tuple[EntryText, ...]


class CpuSegments:
    """Compiled segments; calling it runs one on named arrays.

    Raises:
        BlinkError: a segment cannot be lowered, or the compiler fails.
    """

    def __init__(self, segments: Sequence[Segment], out: Path) -> None:
        self._programs = {segment.name: lower_segment(segment) for segment in segments}
        digests = {segment.name: segment.digest for segment in segments}
        context = SegmentsContext(
            version=blinkc.__version__,
            model_name="segments alone",
            num_weights=0,
            segments=tuple(segment_text(p, digests[n]) for n, p in self._programs.items()),
            calls=(),
            packed=((0, 1, 1, 1, False),),
            caches=((1, 8),),
            experts=(),
            keys=((0, 1, 1),),
            arena_bytes=64,
            vocab_size=1,
            max_step_tokens=1,
            max_batch=1,
            max_pages_per_lane=1,
            page_size_tokens=1,
            logits_offset_bytes=0,
        )
        entries = ChecksContext(
            version=blinkc.__version__,
            segments=tuple(_entry_text(program) for program in self._programs.values()),
        )
        source = render_template("segments.cpp.jinja", context)
        source += render_template("segment_checks.cpp.jinja", entries)
        compile_cpu({"segments.cpp": source}, out=out, flags={"segments.cpp": ["-O2"]})
        self._library = ctypes.CDLL(str(out))

    def __call__(self, segment: Segment, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run `segment`: activations `[rows, *shape]` and weights by name -> outputs by name."""
        program = self._programs[segment.name]
        rows = {"tokens": 0, "samples": 0}
        for spec in segment.activations:
            rows[spec.rows] = len(feeds[spec.name])
        arrays: list[Array] = []
        for value in program.inputs:
            array = np.asarray(feeds[value.name], dtype=_NUMPY_TYPES[value.dtype], order="C")
            arrays.append(array)
        for value in (*program.outputs, *program.intermediates):
            arrays.append(np.zeros((rows[value.rows], value.size), _NUMPY_TYPES[value.dtype]))
        for weight in program.weights:
            arrays.append(np.asarray(feeds[weight.name], dtype=np.float32, order="C"))
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        run = getattr(self._library, f"check_{program.name}")
        tokens, samples = (ctypes.c_uint32(rows[kind]) for kind in ("tokens", "samples"))
        run(pointers, tokens, samples, ctypes.c_uint32(1))
        first = len(program.inputs)
        results = arrays[first : first + len(program.outputs)]
        return {
            spec.name: result.reshape(len(result), *spec.shape)
            for spec, result in zip(segment.outputs, results, strict=True)
        }


def _entry_text(program: Program) -> EntryText:
    names = member_names(program)
    packed, plain = weight_uses(program)
    values = (*program.inputs, *program.outputs, *program.intermediates)
    members = [(names[v.name], _C_TYPES[v.dtype], i) for i, v in enumerate(values)]
    products = []
    for index, weight in enumerate(program.weights, len(values)):
        if weight.name in plain:
            members.append((names[weight.name], "const float", index))
        for gemm in packed.get(weight.name, ()):
            is_transposed = gemm.weight_layout == "kn"
            products.append((packed_member(names, gemm), index, gemm.n, gemm.k, is_transposed))
    return EntryText(name=program.name, plain=tuple(members), packed=tuple(products))
