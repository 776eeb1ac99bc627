"""Which tensors of a checkpoint each weight of the graph is made of: references, never values.

transformers renames and fuses tensors while it loads (one tensor per expert becomes one per
layer). The same mapping is asked here; what references cannot express is left to
`hf_materialize.py`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart, WeightRef
from blinkc.frontend.hf_model import HollowModel
from blinkc.frontend.weights import NUMPY_DTYPES


class UnmappedError(Exception):
    """A tensor of the model is made in a way references cannot express."""


GraphWeights = dict[str, tuple[tuple[int, ...], str]]  # weight inputs of the graph: shape, dtype


def references_from_checkpoint(
    graph_weights: GraphWeights, hollow: HollowModel, tensors: dict[str, WeightPart]
) -> dict[str, WeightRef]:
    """Find the parts of each weight.

    Raises:
        BlinkError: the checkpoint lacks a tensor or has another shape.
        UnmappedError: see there.
    """
    found = _map_tensors(hollow.model, tensors)
    references = {}
    for name, (shape, dtype) in graph_weights.items():
        if name in hollow.buffers and not (name in hollow.persistent and name in found):
            references[name] = reference_from_array(name, hollow.buffers[name])
            continue
        parts = _parts_of_tied(name, hollow.tied.get(name, (name,)), found)
        elements = sum(int(np.prod(part.shape)) for part in parts)
        plain = len(parts) == 1 and not parts[0].transpose
        if elements != np.prod(shape) or (plain and parts[0].shape != shape):
            raise BlinkError(
                f"weight {name} has shape {list(shape)} in the model and "
                f"{[list(part.shape) for part in parts]} in the checkpoint",
                hint="config.json and the weights do not belong together",
            )
        _check_types(name, dtype, parts)
        references[name] = WeightRef(name=name, shape=shape, dtype=dtype, parts=parts)
    return references


def unused_tensors(
    hollow: HollowModel, tensors: dict[str, WeightPart], references: dict[str, WeightRef]
) -> list[str]:
    """Name the tensors of a checkpoint that no weight takes, but those that its model expects.

    A config with fewer layers than the checkpoint, or without the biases that it holds, shows here.
    """
    used = {part.key for reference in references.values() for part in reference.parts}
    tied = {name for names in hollow.tied.values() for name in names if len(names) > 1}
    expected = getattr(hollow.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in (*expected, r"rotary_emb\.inv_freq$")]
    return [
        key
        for key in tensors
        if key not in used
        and key not in tied
        and key not in hollow.buffers
        and not any(pattern.search(key) for pattern in patterns)
    ]


def random_references(
    graph_weights: GraphWeights, hollow: HollowModel, seed: int
) -> dict[str, WeightRef]:
    """Make references to random weights, each with a seed of its own."""
    references = {}
    for name, (shape, dtype) in graph_weights.items():
        if name in hollow.buffers and name not in hollow.persistent:
            references[name] = reference_from_array(name, hollow.buffers[name])
            continue
        # Experts are drawn one by one, to keep memory small.
        count = shape[0] if len(shape) > 2 else 1
        inner = shape[1:] if len(shape) > 2 else shape
        parts = tuple(
            WeightPart(
                source="random",
                key=name,
                shape=inner,
                dtype=dtype,
                seed=(seed << 32) + zlib.crc32(f"{name}#{index}".encode()),
            )
            for index in range(count)
        )
        references[name] = WeightRef(name=name, shape=shape, dtype=dtype, parts=parts)
    return references


def reference_from_array(name: str, value: np.ndarray) -> WeightRef:
    """Carry a small computed tensor within its reference."""
    dtypes = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bool": "bool"}
    dtype = dtypes.get(value.dtype.name, value.dtype.name)
    part = WeightPart(
        source="inline", key=name, shape=value.shape, dtype=dtype, inline=value.tobytes()
    )
    return WeightRef(name=name, shape=value.shape, dtype=dtype, parts=(part,))


def _check_types(name: str, dtype: str, parts: Sequence[WeightPart]) -> None:
    """Raise `BlinkError` where a checkpoint stores numbers of a type that is not read."""
    floats = ("fp32", "fp16", "bf16")
    for part in parts:
        if part.dtype not in (floats if dtype in floats else NUMPY_DTYPES):
            raise BlinkError(
                f"tensor {part.key} in {part.path}, of weight {name}, has type {part.dtype}",
                hint="quantized checkpoints are not supported: use one in fp32, fp16 or bf16",
            )


def _parts_of_tied(
    name: str, names: Sequence[str], found: dict[str, tuple[WeightPart, ...]]
) -> tuple[WeightPart, ...]:
    """Look a weight up under any of the names that share it."""
    present = [other for other in names if other in found]
    if not present:
        raise BlinkError(
            f"the checkpoint holds no tensor for weight {name}",
            hint="it may be incomplete, or of another architecture than config.json says",
        )
    if len(present) > 1 and any(not _equal(found[present[0]], found[n]) for n in present[1:]):
        raise BlinkError(
            f"config.json ties {' and '.join(present)}, but the checkpoint holds different tensors",
            hint='set "tie_word_embeddings": false in config.json if they are meant to differ',
        )
    return found[present[0]]


def _equal(left: tuple[WeightPart, ...], right: tuple[WeightPart, ...]) -> bool:
    from blinkc.frontend.weights import read_part

    return len(left) == len(right) and all(
        np.array_equal(read_part(a).view(np.uint8), read_part(b).view(np.uint8))
        for a, b in zip(left, right, strict=True)
    )


def _map_tensors(model: Any, tensors: dict[str, WeightPart]) -> dict[str, tuple[WeightPart, ...]]:
    """Follow transformers' loading: the model's names, with the checkpoint's parts of each."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, tuple[WeightPart, ...]] = {}
    gathered: dict[str, dict[str, list[WeightPart]]] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            continue
        if pattern is None:
            found[name] = (tensors[key],)
        else:
            gathered.setdefault(name, {}).setdefault(pattern, []).append(tensors[key])
    for name, by_source in gathered.items():
        converter = by_pattern[next(iter(by_source))]
        ordered = [by_source.get(pattern, []) for pattern in converter.source_patterns]
        found[name] = _fused(name, converter, ordered)
    return found


def _fused(name: str, converter: Any, sources: list[list[WeightPart]]) -> tuple[WeightPart, ...]:
    """Express what a converter of transformers does as parts joined along axis 0."""
    steps = [
        (type(step).__name__, getattr(step, "dim", getattr(step, "dim0", 0)))
        for step in converter.operations
    ]
    if len(converter.target_patterns) == 1 and len({len(parts) for parts in sources}) == 1:
        if steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            # [E, 2I, H] lies in memory as gate of expert 0, up of expert 0, gate of expert 1, ...
            return tuple(part for expert in zip(*sources, strict=True) for part in expert)
        if steps == [("Concatenate", 0)]:
            return tuple(part for parts in sources for part in parts)
        if steps == [("Transpose", 0)] and converter.operations[0].dim1 == 1:
            (part,) = sources[0]
            if len(part.shape) == 2 and not converter.operations[0].check_dims:
                return (replace(part, transpose=True),)
    raise UnmappedError(f"weight {name}: {[step for step, _ in steps]}")
