"""Segmented model and capture plan -> `segments.cpp`, the CPU target's model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import blinkc
from blinkc.capture.arena import ArenaRequest, plan_arena
from blinkc.codegen.environment import render_template
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.print_c import print_number
from blinkc.engine.program import Constant, GemmKernel, Program, Value, Weight
from blinkc.engine.render_row_kernel import C_TYPES, render_row_kernel
from blinkc.errors import BlinkError, InternalError
from blinkc.surgery.segments import CutOpCall, SegmentCall, SegmentedModel

if TYPE_CHECKING:
    from blinkc.capture.plan import CapturePlan

ACTIVATIONS = {"silu": "kSilu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh"}
STEP_INPUTS = {"input_ids": "input_ids", "positions": "positions", "rows": "sample_token"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelText:
    """One kernel of a segment, ready for the template."""

    kind: str  # "row" or "gemm"
    rows: str  # "num_tokens" or "num_rows"
    name: str = ""
    lines: tuple[str, ...] = ()  # row kernel: its body
    x: str = ""  # gemm: members of the segment's arguments
    weight: str = ""
    bias: str = ""
    out: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentText:
    """One segment: its argument struct, kernels and tables."""

    name: str
    digest: str
    members: tuple[tuple[str, str], ...]  # C++ type, name
    tables: tuple[tuple[str, str, str], ...]  # C++ type, name, values
    kernels: tuple[KernelText, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallText:
    """One call of a step: the function and its designated arguments."""

    kind: str  # "segment", "attention", "experts" or "sample"
    name: str
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentsContext:
    """What segments.cpp.jinja is filled with."""

    version: str
    model_name: str
    num_weights: int
    segments: tuple[SegmentText, ...]
    calls: tuple[CallText, ...]
    packed: tuple[tuple[int, int, int, int, bool], ...]  # weight, n, k, count, transposed
    caches: tuple[tuple[int, int], ...]  # kv heads, head size
    experts: tuple[tuple[int, int, int, int], ...]  # per token, experts, hidden, intermediate
    keys: tuple[tuple[int, int, int], ...]  # kind, batch, seqlen
    arena_bytes: int
    logits_offset_bytes: int
    vocab_size: int
    max_step_tokens: int
    max_batch: int
    max_pages_per_lane: int
    page_size_tokens: int


def render_cpu_model(segmented: SegmentedModel, plan: CapturePlan) -> str:
    """Return the source of the CPU target's model.

    Raises:
        BlinkError: a segment cannot be lowered, or is not fp32; names the node.
    """
    return render_template("segments.cpp.jinja", _Renderer(segmented, plan).context())


def _rows(rows: str) -> str:
    return "num_tokens" if rows == "tokens" else "num_rows"


@dataclass(slots=True)
class _Renderer:
    segmented: SegmentedModel
    plan: CapturePlan
    programs: list[Program] = field(default_factory=list)
    packed: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    packed_first: list[int] = field(default_factory=list)  # of each, in the model's array
    offsets: dict[str, int] = field(default_factory=dict)

    def context(self) -> SegmentsContext:
        plan, model = self.plan, self.segmented
        self.programs = [lower_segment(segment) for segment in model.segments]
        arena_bytes = self._place_values()
        calls = tuple(self._call(i, call) for i, call in enumerate(model.calls))
        return SegmentsContext(
            version=blinkc.__version__,
            model_name=model.spec.name,
            num_weights=len(model.weights),
            segments=tuple(
                segment_text(program, segment.digest)
                for program, segment in zip(self.programs, model.segments, strict=True)
            ),
            calls=calls,
            packed=tuple(self.packed),
            caches=self._caches(),
            experts=tuple(self._experts_sizes()),
            keys=tuple((int(k.kind == "decode"), k.batch, k.seqlen) for k in plan.keys),
            arena_bytes=arena_bytes,
            logits_offset_bytes=self.offsets[_logits_name(model)],
            vocab_size=model.spec.vocab_size,
            max_step_tokens=plan.max_step_tokens,
            max_batch=plan.max_batch,
            max_pages_per_lane=plan.max_pages_per_lane,
            page_size_tokens=plan.page_size_tokens,
        )

    def _place_values(self) -> int:
        """Place values and intermediates in the arena by the calls they live through."""
        lives: dict[str, tuple[int, int]] = {}
        sizes: dict[str, int] = {}
        for i, call in enumerate(self.segmented.calls):
            for name in (*call.activations, *call.outputs):
                lives[name] = (lives.get(name, (i, i))[0], i)
                spec = self.segmented.values[name]
                sizes[name] = self._bytes(spec.rows, int(np.prod(spec.shape, dtype=np.int64)))
            if isinstance(call, SegmentCall):
                for value in self.programs[call.segment].intermediates:
                    name = f"call{i}.{value.name}"
                    lives[name], sizes[name] = (i, i), self._bytes(value.rows, value.size)
        requests = [
            ArenaRequest(name=name, num_bytes=sizes[name], first=first, last=last)
            for name, (first, last) in lives.items()
            if name not in STEP_INPUTS
        ]
        arena = plan_arena(requests)
        self.offsets = arena.offsets
        return arena.total_bytes

    def _bytes(self, rows: str, size: int) -> int:
        count = self.plan.max_step_tokens if rows == "tokens" else self.plan.max_batch
        return 4 * size * count

    def _value(self, name: str, c_type: str) -> str:
        if name in STEP_INPUTS:
            return f"step.buffers.{STEP_INPUTS[name]}"
        return f"step.value<{c_type}>({self.offsets[name]})"

    def _weight_index(self, name: str) -> int:
        return list(self.segmented.weights).index(name)

    def _pack(self, name: str, n: int, k: int, count: int, transposed: bool) -> int:
        """Return where the packed weight lies in the model's array; equal requests share it."""
        entry = (self._weight_index(name), n, k, count, transposed)
        if entry not in self.packed:
            first = self.packed_first[-1] + self.packed[-1][3] if self.packed else 0
            self.packed.append(entry)
            self.packed_first.append(first)
        return self.packed_first[self.packed.index(entry)]

    def _call(self, number: int, call: SegmentCall | CutOpCall) -> CallText:
        if isinstance(call, SegmentCall):
            return self._segment_call(number, call)
        if call.op == "PagedAttention":
            return self._attention_call(call)
        if call.op == "MoeExperts":
            return self._experts_call(call)
        if call.op == "Sample":
            logits = self._value(call.activations[0], "float")
            return CallText(kind="sample", name="", arguments=(("logits", logits),))
        raise InternalError(f"cut op {call.op} has no CPU kernel")

    def _segment_call(self, number: int, call: SegmentCall) -> CallText:
        program = self.programs[call.segment]
        names = member_names(program)
        arguments: list[tuple[str, str]] = []
        bound = [
            *zip(program.inputs, call.activations, strict=True),
            *zip(program.outputs, call.outputs, strict=True),
            *((value, f"call{number}.{value.name}") for value in program.intermediates),
        ]
        for value, name in bound:
            c_type = _storage(value, program.name)
            arguments.append((names[value.name], self._value(name, c_type)))
        packed, plain = weight_uses(program)
        for weight, name in zip(program.weights, call.weights, strict=True):
            if weight.name in plain:
                arguments.append((names[weight.name], f"step.weight({self._weight_index(name)})"))
            for gemm in packed.get(weight.name, ()):
                index = self._pack(name, gemm.n, gemm.k, 1, gemm.weight_layout == "kn")
                member = packed_member(names, gemm)
                arguments.append((member, f"step.packed({index})"))
        return CallText(kind="segment", name=program.name, arguments=tuple(arguments))

    def _attention_call(self, call: CutOpCall) -> CallText:
        given = call.attributes
        layer = int(given["layer"])
        q, k, v, positions = (self._value(x, "float") for x in call.activations[:4])
        sinks = f"step.weight({self._weight_index(call.weights[0])})" if call.weights else "nullptr"
        arguments = {
            "q": q,
            "k": k,
            "v": v,
            "sinks": sinks,
            "out": self._value(call.outputs[0], "float"),
            "cache": f"step.cache({layer})",
            "positions": positions
            if positions.startswith("step.buffers")
            else "step.buffers.positions",
            "token_row": "step.buffers.token_row",
            "row_lane": "step.buffers.row_lane",
            "page_table": "step.buffers.page_table",
            "num_tokens": "step.num_tokens",
            "num_q_heads": str(given["num_q_heads"]),
            "num_kv_heads": str(given["num_kv_heads"]),
            "head_dim": str(given["head_dim"]),
            "page_size": str(self.plan.page_size_tokens),
            "max_pages_per_lane": str(self.plan.max_pages_per_lane),
            "num_pages": "step.num_pages()",
            "window": str(given.get("window", 0)),
            "scale": print_number(float(given["scale"]), "fp32"),
            "softcap": print_number(float(given.get("softcap", 0.0)), "fp32"),
        }
        return CallText(kind="attention", name="", arguments=tuple(arguments.items()))

    def _caches(self) -> tuple[tuple[int, int], ...]:
        """Return KV heads and head size by layer."""
        layers = {
            int(call.attributes["layer"]): (
                int(call.attributes["num_kv_heads"]),
                int(call.attributes["head_dim"]),
            )
            for call in self.segmented.calls
            if isinstance(call, CutOpCall) and call.op == "PagedAttention"
        }
        return tuple(layers[layer] for layer in range(len(layers)))

    def _experts_call(self, call: CutOpCall) -> CallText:
        spec = self.segmented.spec.experts[int(call.attributes["layer"])]
        activation = str(call.attributes.get("activation", spec.activation))
        if activation not in ACTIVATIONS:
            raise BlinkError(
                f"experts of layer {spec.layer}: activation {activation!r} is not supported",
                hint=f"use one of {', '.join(ACTIVATIONS)}",
            )
        gate_up, down = call.weights
        hidden, middle = self.segmented.weights[down].shape[1:]
        first = self._pack(gate_up, 2 * middle, hidden, spec.num_experts, False)
        second = self._pack(down, hidden, middle, spec.num_experts, False)
        x, ids, weights = call.activations
        arguments = {
            "x": self._value(x, "float"),
            "ids": self._value(ids, "int32_t"),
            "weights": self._value(weights, "float"),
            "gate_up": f"step.packed({first})",
            "down": f"step.packed({second})",
            "out": self._value(call.outputs[0], "float"),
            "num_tokens": "step.num_tokens",
            "hidden": str(hidden),
            "intermediate": str(middle),
            "num_experts": str(spec.num_experts),
            "per_token": str(spec.experts_per_token),
            "activation": f"Activation::{ACTIVATIONS[activation]}",
        }
        return CallText(kind="experts", name="", arguments=tuple(arguments.items()))

    def _experts_sizes(self) -> list[tuple[int, int, int, int]]:
        sizes = []
        for call in self.segmented.calls:
            if isinstance(call, CutOpCall) and call.op == "MoeExperts":
                spec = self.segmented.spec.experts[int(call.attributes["layer"])]
                hidden, middle = self.segmented.weights[call.weights[1]].shape[1:]
                entry = (spec.experts_per_token, spec.num_experts, hidden, middle)
                if entry not in sizes:
                    sizes.append(entry)
        return sizes


def _logits_name(model: SegmentedModel) -> str:
    """Return the value that is sampled from."""
    for call in model.calls:
        if isinstance(call, CutOpCall) and call.op == "Sample":
            return call.activations[0]
    raise InternalError("the model samples nothing")


def _storage(value: Value, where: str) -> str:
    if value.dtype not in C_TYPES:
        raise BlinkError(
            f"{where}: the cpu target computes in fp32, value {value.name} is {value.dtype}",
            hint="compile with --dtype fp32",
        )
    return C_TYPES[value.dtype]


def member_names(program: Program) -> dict[str, str]:
    """Give every buffer a C++ name: x inputs, y outputs, v between, w weights, k... tables."""
    names: dict[str, str] = {}
    groups: dict[str, tuple[Value | Weight, ...]] = {
        "x": program.inputs,
        "y": program.outputs,
        "v": program.intermediates,
        "w": program.weights,
    }
    for letter, buffers in groups.items():
        for i, buffer in enumerate(buffers):
            names[buffer.name] = f"{letter}{i}"
    for constant in program.constants:
        names[constant.name] = f"k{program.name}_{constant.name}"
    return names


def weight_uses(program: Program) -> tuple[dict[str, list[GemmKernel]], set[str]]:
    """Return the products of each weight, and the weights that are read as they are."""
    packed: dict[str, list[GemmKernel]] = {}
    plain: set[str] = set()
    for kernel in program.kernels:
        if isinstance(kernel, GemmKernel):
            users = packed.setdefault(kernel.weight, [])
            if all(other.weight_layout != kernel.weight_layout for other in users):
                users.append(kernel)
            if kernel.bias:
                plain.add(kernel.bias)
        else:
            plain.update(kernel.params)
    return packed, plain & {w.name for w in program.weights}


def packed_member(names: dict[str, str], gemm: GemmKernel) -> str:
    """Name the packed form of a product's weight."""
    return f"{names[gemm.weight]}_{gemm.weight_layout}"


def segment_text(program: Program, digest: str) -> SegmentText:
    names = member_names(program)
    packed, plain = weight_uses(program)
    members: list[tuple[str, str]] = []
    for value in program.inputs:
        members.append((f"const {_storage(value, program.name)}*", names[value.name]))
    for value in (*program.outputs, *program.intermediates):
        members.append((f"{_storage(value, program.name)}*", names[value.name]))
    for weight in program.weights:
        if weight.name in plain:
            members.append(("const float*", names[weight.name]))
        for gemm in packed.get(weight.name, ()):
            members.append(("const PackedWeight*", packed_member(names, gemm)))
    kernels = []
    for kernel in program.kernels:
        if isinstance(kernel, GemmKernel):
            text = KernelText(
                kind="gemm",
                rows=_rows(kernel.rows),
                x=names[kernel.x],
                weight=packed_member(names, kernel),
                bias=f"a.{names[kernel.bias]}" if kernel.bias else "nullptr",
                out=names[kernel.out],
            )
        else:
            lines = tuple(render_row_kernel(program, kernel, names))
            name = f"{program.name}_{kernel.name}"
            text = KernelText(kind="row", rows=_rows(kernel.rows), name=name, lines=lines)
        kernels.append(text)
    return SegmentText(
        name=program.name,
        digest=digest,
        members=tuple(members),
        tables=tuple(_table(names[c.name], c) for c in program.constants),
        kernels=tuple(kernels),
    )


def _table(name: str, constant: Constant) -> tuple[str, str, str]:
    values = ", ".join(print_number(v, constant.dtype) for v in constant.array.tolist())
    return C_TYPES[constant.dtype], name, values
