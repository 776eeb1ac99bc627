"""Runs lowered segments alone: many ONNX graphs -> one shared object -> numpy in, numpy out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.codegen.environment import render_template
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.program import Program
from blinkc.engine.render_cpu import (
    SegmentsContext,
    member_names,
    packed_member,
    segment_text,
    weight_uses,
)
from blinkc.surgery.segments import Segment, ValueSpec

ELEM = {
    "fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}  # fmt: skip
NUMPY = {"fp32": np.float32, "int32": np.int32, "bool": np.bool_}


def make_segment(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[str, tuple[int, ...], str]],
    weights: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[str, tuple[int, ...], str]],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 20,
    dtype: str = "fp32",
) -> Segment:
    """Build a segment; inputs and outputs map a name to (rows, shape, dtype), weights are of
    `dtype`."""

    def spec(key: str, entry: tuple[str, tuple[int, ...], str]) -> ValueSpec:
        return ValueSpec(name=key, rows=entry[0], shape=entry[1], dtype=entry[2])

    def info(s: ValueSpec) -> onnx.ValueInfoProto:
        dims = (*((s.rows,) if s.rows else ()), *s.shape)
        return helper.make_tensor_value_info(s.name, ELEM[s.dtype], dims)

    activations = tuple(spec(k, v) for k, v in inputs.items())
    params = tuple(spec(k, ("", v, dtype)) for k, v in weights.items())
    results = tuple(spec(k, v) for k, v in outputs.items())
    graph = helper.make_graph(
        nodes,
        name,
        [info(s) for s in (*activations, *params)],
        [info(s) for s in results],
        [onnx.numpy_helper.from_array(a, k) for k, a in (initializers or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return Segment(
        name=name, digest="", model=model, activations=activations, weights=params, outputs=results
    )


@dataclass
class SegmentLibrary:
    """A shared object with one entry for each segment."""

    segments: dict[str, Segment]
    programs: dict[str, Program]
    library: ctypes.CDLL

    def run(
        self,
        name: str,
        inputs: dict[str, np.ndarray],
        weights: dict[str, np.ndarray],
        *,
        num_tokens: int,
        num_rows: int = 0,
        num_threads: int = 1,
    ) -> list[np.ndarray]:
        """Run one segment; integer arrays are converted to int32."""
        program = self.programs[name]
        arrays: list[np.ndarray] = []
        for value in program.inputs:
            arrays.append(np.ascontiguousarray(inputs[value.name], dtype=NUMPY[value.dtype]))
        count = {"tokens": num_tokens, "samples": num_rows}
        outputs = []
        for value in (*program.outputs, *program.intermediates):
            out = np.zeros((count[value.rows], value.size), NUMPY[value.dtype])
            arrays.append(out)
            outputs.append(out)
        for weight in program.weights:
            arrays.append(np.ascontiguousarray(weights[weight.name], dtype=np.float32))
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        run = getattr(self.library, f"test_{name}")
        run(pointers, ctypes.c_uint32(num_tokens), ctypes.c_uint32(num_rows), num_threads)
        return outputs[: len(program.outputs)]


def build_library(segments: list[Segment], folder: Path) -> SegmentLibrary:
    """Lower, render and compile segments together."""
    programs = {s.name: lower_segment(s) for s in segments}
    context = SegmentsContext(
        version="test",
        model_name="test",
        num_weights=0,
        segments=tuple(segment_text(programs[s.name], s.digest) for s in segments),
        calls=(),
        packed=((0, 1, 1, 1, False),),
        caches=((1, 8),),
        experts=(),
        keys=((0, 1, 1),),
        arena_bytes=64,
        logits_offset_bytes=0,
        vocab_size=1,
        max_step_tokens=1,
        max_batch=1,
        max_pages_per_lane=1,
        page_size_tokens=1,
    )
    source = render_template("segments.cpp.jinja", context)
    source += "\n".join(_entry(p) for p in programs.values())
    compile_cpu(
        {"segments.cpp": source},
        out=folder / "segments.so",
        flags={"segments.cpp": ["-O2", "-Wno-unused-variable"]},
    )
    library = ctypes.CDLL(str(folder / "segments.so"))
    return SegmentLibrary({s.name: s for s in segments}, programs, library)


def _entry(program: Program) -> str:
    names = member_names(program)
    packed, plain = weight_uses(program)
    values = (*program.inputs, *program.outputs, *program.intermediates)
    lines = []
    types = {"fp32": "float", "int32": "int32_t", "bool": "bool"}
    for i, value in enumerate(values):
        lines.append(f"a.{names[value.name]} = static_cast<{types[value.dtype]}*>(p[{i}]);")
    for i, weight in enumerate(program.weights, len(values)):
        pointer = f"static_cast<const float*>(p[{i}])"
        if weight.name in plain:
            lines.append(f"a.{names[weight.name]} = {pointer};")
        for gemm in packed.get(weight.name, ()):
            member = packed_member(names, gemm)
            transposed = "true" if gemm.weight_layout == "kn" else "false"
            lines.append(
                f"PackedWeight {member} = "
                f"pack_weight(team, {pointer}, {gemm.n}, {gemm.k}, {transposed});"
                f" a.{member} = &{member};"
            )
    body = "\n  ".join(lines)
    return f"""
extern "C" void test_{program.name}(void** p, uint32_t num_tokens, uint32_t num_rows, uint32_t
threads) {{
  using namespace blink::cpu;
  Team team(threads);
  {program.name}_args a;
  {body}
  auto job = [&](Worker& worker) {{ run_{program.name}(worker, num_tokens, num_rows, a); }};
  team.run(job);
}}
"""
