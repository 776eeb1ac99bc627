"""Spare most exports the second trace of the model that torch.onnx makes to decompose ops.

Decomposing takes half of an export's time and changes nothing in graphs whose every op has a
translation already. All that most models need is conversions (`aten.to`) spelled as the op that
has one. Anything else, in-place ops above all, takes torch's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def skip_needless_decompositions() -> Iterator[None]:
    """Within, torch.onnx decomposes only graphs that need it."""
    try:
        from torch.onnx._internal.exporter import _decomp, _fx_passes

        decompose = _fx_passes.decompose_with_registry
        implemented = _decomp.get_onnx_implemented_overloads
    except (ImportError, AttributeError):
        yield  # another torch: slower, equally right
        return

    def decompose_if_needed(program: Any, registry: Any) -> Any:
        if _is_translatable(program.graph, set(implemented(registry))):
            _spell_conversions(program.graph)
            return program
        return decompose(program, registry)

    with mock.patch.object(_fx_passes, "decompose_with_registry", decompose_if_needed):
        yield


def _conversions() -> set[Any]:
    """Overloads of `Tensor.to` that say nothing but type and device."""
    aten = torch.ops.aten
    return {aten.to.dtype, aten.to.device, aten.to.dtype_layout}


def _is_translatable(graph: Any, implemented: set[Any]) -> bool:
    conversions = _conversions()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False
        if node.target in conversions:
            continue
        is_check = node.target is torch.ops.aten._assert_tensor_metadata.default
        is_symbol = schema is None or getattr(node.target, "namespace", "") == "blink"
        if not (is_check or is_symbol or node.target in implemented):
            return False
    return True


def _spell_conversions(graph: Any) -> None:
    """Write each conversion as `aten._to_copy`, or drop it where the type stays."""
    conversions = _conversions()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in conversions:
            source = node.args[0]
            dtype = node.meta["val"].dtype
            is_output = any(
                user.op == "output" for user in node.users
            )  # the signature has its name
            if source.meta["val"].dtype == dtype and not is_output:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
            else:
                node.target = torch.ops.aten._to_copy.default
                node.args, node.kwargs = (source,), {"dtype": dtype}
