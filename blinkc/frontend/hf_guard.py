"""Prove that a model mixes tokens in attention only: run it on shapes alone and watch.

The export puts tokens on the batch axis, one token a sequence, where an op along the sequence (a
convolution, a shift, a scan) would quietly see one token. So the model is run once more, on the
meta device, with a sequence of a length that no other axis has: every op must keep that axis as
it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blinkc.errors import BlinkError
from blinkc.frontend.hf_interfaces import tracing_positions

_SEQUENCE = 8191  # a prime that no config uses as a size


def check_token_independence(model: Any) -> None:
    """Run `model` on one sequence without data.

    Raises:
        BlinkError: an op outside the interfaces reduces, shifts or mixes tokens; it is named.
    """
    ids = torch.zeros(1, _SEQUENCE, dtype=torch.int64, device="meta")
    positions = torch.zeros(1, _SEQUENCE, dtype=torch.int64, device="meta")
    watch = _Watch(model)
    try:
        with torch.no_grad(), tracing_positions(positions[0]), watch:
            model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise BlinkError(
            f"{type(model).__name__} cannot be run on shapes alone: {error}",
            hint="what it computes depends on the data of a step, or it takes no position_ids",
        ) from error


# Ops that keep the length of an axis and still mix along it, with the position of their axis
# argument.
_AXIS_OPS = {
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "cummax": 1,
    "cummin": 1,
    "_softmax": 1,
    "_log_softmax": 1,
    "sort": 1,
    "argsort": 1,
    "flip": 1,
    "roll": 2,
    "index_select": 1,
    "gather": 1,
    "scatter": 1,
    "scatter_add": 1,
}
_MIXING_OPS = frozenset({"convolution", "_fft_r2c", "_fft_c2c", "unfold", "constant_pad_nd"})


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Checks each op on tensors that carry the sequence axis."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> _Watch:
        hooks = torch.nn.modules.module
        self._hooks = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module),
        ]
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: Any, _inputs: Any) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, _module: Any, _inputs: Any, _output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _token_axes(leaf)]
        if inputs:
            name = func.__name__.split(".")[0]
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            axis_argument = _AXIS_OPS.get(name)
            along = (
                axis_argument is not None
                and len(args) > axis_argument
                and _works_along_tokens(args[0], args[axis_argument])
            )
            if name in _MIXING_OPS or along or any(len(_token_axes(o)) != 1 for o in outputs):
                self._refuse(name, inputs, outputs)
        return out

    def _refuse(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        where = self._stack[-1] if self._stack and self._stack[-1] else "the model"
        shapes = [
            ["T" if d == _SEQUENCE else d for d in leaf.shape] for leaf in (*inputs, *outputs)
        ]
        raise BlinkError(
            f"{where}: op {name} mixes tokens outside attention (shapes {shapes})",
            hint="only models whose layers mix tokens in attention alone can be compiled: "
            "no convolutions, scans, recurrences, or biases made from the mask",
        )


def _token_axes(leaf: Any) -> list[int]:
    if not isinstance(leaf, torch.Tensor):
        return []
    return [axis for axis, dim in enumerate(leaf.shape) if dim and dim % _SEQUENCE == 0]


def _works_along_tokens(tensor: Any, axis: Any) -> bool:
    axes = axis if isinstance(axis, list | tuple) else [axis]
    return any(int(item) % max(tensor.dim(), 1) in _token_axes(tensor) for item in axes)
