"""Engine `cuda`: segmented model + capture plan -> kernels.cu and the step's launch list.

The launch list is plain JSON that the loader expands for every graph key: each entry names an
operation, its buffers (by place in the arena, step buffer or weight number) and sizes; only rows
differ between keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from blinkc.capture.arena import ArenaRequest, plan_arena
from blinkc.engine.cuda_rows import BYTES, CudaRowKernel, render_cuda_row_kernel
from blinkc.engine.cuda_source import CudaNeeds, render_cuda_source
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.program import Apply, Expr, GemmKernel, Load, Map, Program, RowKernel
from blinkc.engine.segment_engines import SegmentEngine, empty_program
from blinkc.errors import BlinkError, InternalError
from blinkc.surgery.segments import CutOpCall, SegmentCall, SegmentedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blinkc.capture.plan import CapturePlan

LAUNCH_LIST_FORMAT = 4  # grows when a kernel's name, grid or arguments change
MAX_EXPERTS, MAX_CHOICES = 1024, 32  # kMaxExperts, kMaxChoices of moe.cuh
STEP_INPUTS = {"input_ids": "input_ids", "positions": "positions", "rows": "sample_token"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaModel:
    """The `cuda` engine's output: `kernels.cu` and what `launches.json` holds."""

    source: str
    launches: dict[str, Any]


def render_cuda_model(
    segmented: SegmentedModel,
    plan: CapturePlan,
    engines: Mapping[int, SegmentEngine] | None = None,
) -> CudaModel:
    """Lower every segment and write down the step.

    Args:
        engines: plans by the number of their segment, instead of or beside this engine's kernels.

    Raises:
        BlinkError: a node cannot be lowered, or a kernel lacks what the model needs; names it.
    """
    return _Renderer(segmented, plan, dict(engines or {})).render()


@dataclass(frozen=True, kw_only=True, slots=True)
class _HalfLogits:
    """The half-precision logits behind a row kernel that only widens them."""

    segment: int
    kernel: int
    value: str
    dtype: str


def _widened(kernel: RowKernel, output: str) -> str | None:
    """Return the half buffer that a row kernel copies to the fp32 `output`, if it does nothing
    else."""
    if kernel.outputs != (output,) or len(kernel.body) != 1 or not isinstance(kernel.body[0], Map):
        return None
    statement = kernel.body[0]
    expr: Expr = statement.expr
    if isinstance(expr, Apply) and expr.op == "cast" and expr.dtype == "fp32":
        expr = expr.args[0]
    is_copy = (
        isinstance(expr, Load)
        and expr.row is None
        and expr.dtype in ("bf16", "fp16")
        and len(statement.stores) == 1
        and expr.index == statement.stores[0].index
    )
    return expr.buffer if is_copy and isinstance(expr, Load) else None


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


@dataclass(slots=True)
class _Renderer:
    segmented: SegmentedModel
    plan: CapturePlan
    engines: dict[int, SegmentEngine] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    rows: dict[tuple[int, int], CudaRowKernel] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    sampled: _HalfLogits | None = None

    def render(self) -> CudaModel:
        model, plan = self.segmented, self.plan
        self._check()
        self.programs = [
            empty_program(segment) if self._only_plan(number) else lower_segment(segment)
            for number, segment in enumerate(model.segments)
        ]
        self.weights = {name: i for i, name in enumerate(model.weights)}
        self.sampled = self._find_half_logits()
        for s, program in enumerate(self.programs):
            for k, kernel in enumerate(program.kernels):
                if not isinstance(kernel, GemmKernel) and not self._is_skipped(s, k):
                    name = f"rows_{s}_{k}_{_identifier(program.name)}"
                    self.rows[s, k] = render_cuda_row_kernel(program, kernel, name)
        arena_bytes = self._place_values()
        steps = [step for i, call in enumerate(model.calls) for step in self._call(i, call)]
        launches = {
            "format": LAUNCH_LIST_FORMAT,
            "dtype": model.spec.dtype,
            "arena_bytes": arena_bytes,
            "weights": [
                {"name": ref.name, "shape": list(ref.shape), "dtype": ref.dtype}
                for ref in model.weights.values()
            ],
            "kv_layers": [[layer.num_kv_heads, layer.head_dim] for layer in plan.kv_layers],
            "vocab_size": model.spec.vocab_size,
            "steps": steps,
            "engines": [engine.to_json() for _, engine in sorted(self.engines.items())],
        }
        source = render_cuda_source(self._needs())
        return CudaModel(source=source, launches=launches)

    def _only_plan(self, segment: int) -> bool:
        return segment in self.engines and not self.engines[segment].has_kernels

    def _check(self) -> None:
        """Refuse what the kernels do not have, before anything is lowered."""
        dtype, page = self.segmented.spec.dtype, self.plan.page_size_tokens
        if dtype not in ("bf16", "fp16"):
            raise BlinkError(
                f"the cuda engine computes in bf16 or fp16, the model is {dtype}",
                hint="compile with --dtype bf16",
            )
        if page < 16 or page & (page - 1):
            raise BlinkError(
                f"pages of {page} tokens: the cuda engine wants a power of two from 16 on"
            )

    def _find_half_logits(self) -> _HalfLogits | None:
        """Find a row kernel that only widens the logits to fp32: sampling reads what it reads.

        Widening is exact, so the tokens are the same; the copy and its kernel are saved.
        """
        calls = self.segmented.calls
        sample = next((c for c in calls if isinstance(c, CutOpCall) and c.op == "Sample"), None)
        for number, call in enumerate(calls):
            if sample is None or not isinstance(call, SegmentCall):
                continue
            if sample.activations[0] not in call.outputs or call.segment in self.engines:
                continue
            program = self.programs[call.segment]
            output = program.outputs[call.outputs.index(sample.activations[0])]
            users = sum(c.segment == call.segment for c in calls if isinstance(c, SegmentCall))
            for k, kernel in enumerate(program.kernels):
                source = None if isinstance(kernel, GemmKernel) else _widened(kernel, output.name)
                inner = next((v for v in program.intermediates if v.name == source), None)
                if inner and users == 1 and inner.size == output.size and inner.rows == output.rows:
                    return _HalfLogits(
                        segment=call.segment,
                        kernel=k,
                        value=f"call{number}.{inner.name}",
                        dtype=inner.dtype,
                    )
        return None

    def _is_skipped(self, segment: int, kernel: int) -> bool:
        at = self.sampled
        return at is not None and (at.segment, at.kernel) == (segment, kernel)

    def _needs(self) -> CudaNeeds:
        heads, activations, logits = set(), set(), ""
        ids, weights = "int32", self.segmented.spec.dtype
        for call in self.segmented.calls:
            if not isinstance(call, CutOpCall):
                continue
            if call.op == "PagedAttention":
                given = call.attributes
                heads.add(
                    (
                        int(given["head_dim"]),
                        int(given["num_q_heads"]) // int(given["num_kv_heads"]),
                    )
                )
            elif call.op == "MoeExperts":
                activations.add(self._activation(call))
                weights = self._dtype(call.activations[2])
            elif call.op == "Sample":
                logits = self.sampled.dtype if self.sampled else self._dtype(call.activations[0])
        if len(activations) > 1:
            raise BlinkError(
                f"experts with different activations: {', '.join(sorted(activations))}"
            )
        return CudaNeeds(
            dtype=self.segmented.spec.dtype,
            heads=tuple(sorted(heads)),
            logits_dtype=logits,
            activation=activations.pop() if activations else "",
            ids_dtype=ids,
            expert_weights_dtype=weights,
            row_kernels=tuple(kernel.source for kernel in self.rows.values()),
        )

    def _activation(self, call: CutOpCall) -> str:
        spec = next(
            (s for s in self.segmented.spec.experts if s.layer == int(call.attributes["layer"])),
            None,
        )
        return str(call.attributes.get("activation", spec.activation if spec else ""))

    def _dtype(self, value: str) -> str:
        """Return the dtype a value is stored in; integers are 4 bytes everywhere."""
        dtype = self.segmented.values[value].dtype
        return "int32" if dtype == "int64" else dtype

    def _place_values(self) -> int:
        lives: dict[str, tuple[int, int]] = {}
        sizes: dict[str, int] = {}
        for i, call in enumerate(self.segmented.calls):
            for name in (*call.activations, *call.outputs):
                lives[name] = (lives.get(name, (i, i))[0], i)
                spec = self.segmented.values[name]
                sizes[name] = self._bytes(spec.rows, prod(spec.shape), self._dtype(name))
            if isinstance(call, SegmentCall):
                for value in self.programs[call.segment].intermediates:
                    name = f"call{i}.{value.name}"
                    is_sampled = self.sampled is not None and self.sampled.value == name
                    lives[name] = (i, len(self.segmented.calls) - 1 if is_sampled else i)
                    sizes[name] = self._bytes(value.rows, value.size, value.dtype)
        arena = plan_arena(
            [
                ArenaRequest(name=name, num_bytes=sizes[name], first=first, last=last)
                for name, (first, last) in lives.items()
                if name not in STEP_INPUTS
            ]
        )
        self.offsets = arena.offsets
        return arena.total_bytes

    def _bytes(self, rows: str, size: int, dtype: str) -> int:
        count = self.plan.max_step_tokens if rows == "tokens" else self.plan.max_batch
        return size * count * BYTES[dtype]

    def _value(self, name: str) -> list[Any]:
        """Name a buffer for the loader: a step buffer or a place in the arena."""
        if name in STEP_INPUTS:
            return ["step", STEP_INPUTS[name]]
        return ["arena", self.offsets[name]]

    def _weight(self, name: str) -> list[Any]:
        return ["weight", self.weights[name]]

    def _call(self, number: int, call: SegmentCall | CutOpCall) -> list[dict[str, Any]]:
        if isinstance(call, SegmentCall):
            return self._segment(number, call)
        if call.op == "PagedAttention":
            return [self._attention(call)]
        if call.op == "MoeExperts":
            return [self._experts(call)]
        if call.op == "Sample":
            logits, dtype = call.activations[0], self._dtype(call.activations[0])
            if self.sampled:
                logits, dtype = self.sampled.value, self.sampled.dtype
            return [{"op": "sample", "logits": self._value(logits), "dtype": dtype}]
        raise InternalError(f"cut op {call.op} has no CUDA kernel")

    def _segment(self, number: int, call: SegmentCall) -> list[dict[str, Any]]:
        program = self.programs[call.segment]
        bound = {
            **{
                v.name: self._value(n)
                for v, n in zip(program.inputs, call.activations, strict=True)
            },
            **{v.name: self._value(n) for v, n in zip(program.outputs, call.outputs, strict=True)},
            **{v.name: self._value(f"call{number}.{v.name}") for v in program.intermediates},
            **{w.name: self._weight(n) for w, n in zip(program.weights, call.weights, strict=True)},
        }
        steps: list[dict[str, Any]] = []
        for k, kernel in enumerate(program.kernels):
            if self._is_skipped(call.segment, k):
                continue
            if isinstance(kernel, GemmKernel):
                steps.append(
                    {
                        "op": "gemm",
                        "rows": kernel.rows,
                        "x": bound[kernel.x],
                        "weight": bound[kernel.weight],
                        "bias": bound[kernel.bias] if kernel.bias else None,
                        "out": bound[kernel.out],
                        "n": kernel.n,
                        "k": kernel.k,
                        "layout": kernel.weight_layout,
                        "dtype": program.value(kernel.x).dtype,
                        "out_dtype": program.value(kernel.out).dtype,
                    }
                )
            else:
                row = self.rows[call.segment, k]
                steps.append(
                    {
                        "op": "rows",
                        "rows": kernel.rows,
                        "kernel": row.name,
                        "threads": row.threads,
                        "blocks_per_row": row.blocks_per_row,
                        "shared_bytes": row.shared_bytes,
                        "args": [bound[name] for name in row.arguments],
                    }
                )
        if call.segment in self.engines:
            engine = sorted(self.engines).index(call.segment)
            steps = [{**step, "instead_of": engine} for step in steps]
            names = [value.name for value in (*program.inputs, *program.outputs)]
            names += [weight.name for weight in program.weights]
            tensors = {name: bound[name] for name in names}
            steps.insert(0, {"op": "engine", "engine": engine, "tensors": tensors})
        return steps

    def _attention(self, call: CutOpCall) -> dict[str, Any]:
        given = call.attributes
        q, k, v = (self._value(name) for name in call.activations[:3])
        return {
            "op": "attention",
            "layer": int(given["layer"]),
            "q": q,
            "k": k,
            "v": v,
            "out": self._value(call.outputs[0]),
            "sinks": self._weight(call.weights[0]) if call.weights else None,
            "num_q_heads": int(given["num_q_heads"]),
            "num_kv_heads": int(given["num_kv_heads"]),
            "head_dim": int(given["head_dim"]),
            "scale": float(given["scale"]),
            "window": int(given.get("window", 0)),
            "softcap": float(given.get("softcap", 0.0)),
        }

    def _experts(self, call: CutOpCall) -> dict[str, Any]:
        x, ids, weights = (self._value(name) for name in call.activations)
        gate_up, down = call.weights
        num_experts, hidden, intermediate = self.segmented.weights[down].shape
        if hidden % 128 or intermediate % 32:
            raise BlinkError(
                f"experts of layer {call.attributes['layer']}: sizes {hidden} and {intermediate}",
                hint="the cuda engine takes hidden sizes in steps of 128, inner ones of 32",
            )
        num_choices = prod(self.segmented.values[call.activations[1]].shape)
        if num_experts > MAX_EXPERTS or num_choices > MAX_CHOICES:
            raise BlinkError(
                f"experts of layer {call.attributes['layer']}: {num_choices} of {num_experts}",
                hint=f"the cuda engine takes up to {MAX_CHOICES} of {MAX_EXPERTS}",
            )
        return {
            "op": "experts",
            "x": x,
            "ids": ids,
            "weights": weights,
            "gate_up": self._weight(gate_up),
            "down": self._weight(down),
            "out": self._value(call.outputs[0]),
            "num_experts": num_experts,
            "num_choices": num_choices,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
        }
