"""Segment -> Program: products become kernels, all between them as few row kernels as can be.

Stages: a product reads what row kernels of its stage wrote; what follows a product belongs to the
next stage. One row kernel for each (stage, row dimension). A tensor runs as late as its consumers
allow, so that it is stored between kernels only where one kernel makes it and another reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blinkc.engine.build_row_kernel import ConstantPool, build_row_kernel
from blinkc.engine.program import GemmKernel, Kernel, Program, Value
from blinkc.engine.read_segment import SegmentTensors, read_segment
from blinkc.engine.tensors import SAMPLES, TOKENS, Tensor
from blinkc.errors import InternalError

if TYPE_CHECKING:
    from blinkc.surgery.segments import Segment


def lower_segment(segment: Segment) -> Program:
    """Lower one segment.

    Raises:
        BlinkError: a node mixes tokens, or its operator is not supported; the message names it.
    """
    tensors = read_segment(segment)
    return _Lowering(segment.name, tensors).program()


def canonical(tensor: Tensor) -> Tensor:
    """Look through views that keep the flat layout of a row."""
    while tensor.kind == "view" and tensor.keeps_layout:
        tensor = tensor.inputs[0]
    return tensor


def topological(roots: list[Tensor]) -> list[Tensor]:
    """Return every tensor below `roots`, inputs first."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        tensor, done = stack.pop()
        if done:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            stack.append((tensor, True))
            stack.extend((i, False) for i in reversed(tensor.inputs) if id(i) not in seen)
    return order


def is_local(tensor: Tensor) -> bool:
    """Say whether a row kernel computes this tensor (and no buffer holds it from the start)."""
    return tensor.kind not in ("source", "constant", "view", "gemm")


@dataclass(slots=True)
class _Lowering:
    name: str
    tensors: SegmentTensors
    order: list[Tensor] = field(default_factory=list)
    stage: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)  # tensors that lie in row buffers
    intermediates: list[Value] = field(default_factory=list)
    stored: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)  # by row kernel
    targets: dict[int, list[str]] = field(default_factory=dict)  # tensor -> buffers to write

    def program(self) -> Program:
        outputs = self._claim_outputs()
        self.order = topological([*self.tensors.results, *outputs])
        self._assign_stages(outputs)
        gemms = [x for x in self.order if x.kind == "gemm"]
        self._place_gemms(gemms)
        for root in [*outputs, *(canonical(g.inputs[0]) for g in gemms)]:
            self._store(root)
        self._store_crossing_values()
        constants = ConstantPool()
        kernels: list[Kernel] = []
        for stage in sorted(set(self.stage.values())):
            for rows in (TOKENS, SAMPLES):
                results = self.stored.get((stage, rows), [])
                if results:
                    name = f"row{sum(not isinstance(k, GemmKernel) for k in kernels)}"
                    kernels.append(self._row_kernel(name, rows, results, constants))
            kernels += [self._gemm(g) for g in gemms if self.stage[id(g)] == stage]
        return Program(
            name=self.name,
            inputs=self.tensors.inputs,
            weights=self.tensors.weights,
            outputs=self.tensors.outputs,
            intermediates=tuple(self.intermediates),
            constants=constants.constants(),
            kernels=tuple(kernels),
        )

    def _claim_outputs(self) -> list[Tensor]:
        """Give each segment output a tensor to be stored; products write theirs directly."""
        roots = []
        for value, result in zip(self.tensors.outputs, self.tensors.results, strict=True):
            root = canonical(result)
            if root.kind == "gemm" and id(root) not in self.buffers:
                self.buffers[id(root)] = value.name
                continue
            if root.kind in ("source", "gemm", "constant"):  # a copy
                root = Tensor("", root.shape, root.dtype, "view", (root,), _same(root))
            self.targets.setdefault(id(root), []).append(value.name)
            roots.append(root)
        return roots

    def _assign_stages(self, outputs: list[Tensor]) -> None:
        for x in self.order:
            stages = [self.stage[id(i)] + (i.kind == "gemm") for i in x.inputs if i.rows]
            self.stage[id(x)] = max(stages, default=0)
        pinned = {id(root) for root in outputs}
        consumers = self._consumers()
        for x in reversed(self.order):
            if is_local(x) and x.rows and id(x) not in pinned:
                later = [self.stage[id(c)] for c in consumers.get(id(x), [])]
                self.stage[id(x)] = max(self.stage[id(x)], min(later, default=0))

    def _consumers(self) -> dict[int, list[Tensor]]:
        """Map each tensor to who reads it, views looked through."""
        consumers: dict[int, list[Tensor]] = {}
        roots = {key for key in self.targets}
        for x in self.order:
            if is_local(x) or x.kind == "gemm" or id(x) in roots:
                for source, _ in sources_of(x):
                    consumers.setdefault(id(source), []).append(x)
        return consumers

    def _place_gemms(self, gemms: list[Tensor]) -> None:
        for value in self.tensors.inputs:
            for x in self.order:
                if x.kind == "source" and x.rows and x.name == value.name:
                    self.buffers[id(x)] = value.name
        for gemm in gemms:
            if id(gemm) not in self.buffers:
                self.buffers[id(gemm)] = self._intermediate(gemm)

    def _intermediate(self, tensor: Tensor) -> str:
        name = f"v{len(self.intermediates)}"
        value = Value(name=name, rows=tensor.rows, size=tensor.size, dtype=tensor.dtype)
        self.intermediates.append(value)
        return name

    def _store(self, root: Tensor) -> None:
        """Have a row kernel of the root's stage write it."""
        if id(root) in self.buffers:
            return
        if not root.rows:
            raise InternalError(f"{self.name}: {root.name} has no row dimension")
        names = self.targets.setdefault(id(root), [])
        if not names:
            names.append(self._intermediate(root))
        self.buffers[id(root)] = names[0]
        self.stored.setdefault((self.stage[id(root)], root.rows), []).append(root)

    def _store_crossing_values(self) -> None:
        """Store every tensor that another row kernel than its own reads."""
        for x in self.order:
            if not is_local(x) and id(x) not in self.targets:
                continue
            for source, foreign in sources_of(x):
                other = self.stage[id(source)] != self.stage[id(x)] or source.rows != x.rows
                if is_local(source) and source.rows and (other or foreign):
                    self._store(source)

    def _row_kernel(
        self, name: str, rows: str, results: list[Tensor], constants: ConstantPool
    ) -> Kernel:
        made = {id(x) for x in results}
        available = {key: b for key, b in self.buffers.items() if key not in made}
        targets = [(x, tuple(self.targets[id(x)])) for x in results]
        return build_row_kernel(name, rows, targets, available, constants)

    def _gemm(self, gemm: Tensor) -> GemmKernel:
        given = gemm.attributes
        return GemmKernel(
            rows=gemm.rows,
            x=self.buffers[id(canonical(gemm.inputs[0]))],
            weight=given["weight"],
            bias=given["bias"],
            out=self.buffers[id(gemm)],
            n=given["n"],
            k=given["k"],
            weight_layout=given["layout"],
        )


def _same(source: Tensor):  # type: ignore[no-untyped-def]
    return lambda reader, point: reader.element(source, point)


def sources_of(tensor: Tensor) -> list[tuple[Tensor, bool]]:
    """Return what a tensor reads, views looked through, and whether at rows given by data."""
    found: list[tuple[Tensor, bool]] = []
    stack = [(i, tensor.foreign_rows and n == 0) for n, i in enumerate(tensor.inputs)]
    while stack:
        source, foreign = stack.pop()
        if source.kind == "view":
            for n, i in enumerate(source.inputs):
                stack.append((i, foreign or (source.foreign_rows and n == 0)))
        else:
            found.append((source, foreign))
    return found
