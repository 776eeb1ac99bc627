"""Hollow model -> one ONNX graph: weights are inputs, attention and experts single nodes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import onnx
import torch

from blinkc.errors import BlinkError
from blinkc.frontend.hf_interfaces import interfaces, tracing_positions
from blinkc.frontend.hf_model import HollowModel
from blinkc.frontend.hf_shortcut import skip_needless_decompositions

OPSET = 18
STEP_INPUTS = ("input_ids", "positions", "rows")
_MAX_TOKENS = 1 << 20  # upper end of the symbolic token count, for torch.export alone
_PREFIX = "model."


class StepOfModel(torch.nn.Module):  # type: ignore[misc]
    """The model as a step sees it: ids and positions `[T]`, rows `[R]` -> logits `[R, V]`.

    Tokens lie on transformers' batch axis, each a sequence of one: what the model computes per
    batch entry is then per token by construction.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._rows: torch.Tensor | None = None
        self._last_hidden_was_cut = False
        # Some heads call the base model, some the decoder inside it.
        for trunk in {id(m): m for m in (model.base_model, model.get_decoder())}.values():
            trunk.register_forward_hook(self._keep_rows)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        self._rows = rows
        self._last_hidden_was_cut = False
        with tracing_positions(positions):
            output = self.model(
                input_ids=input_ids[:, None],
                position_ids=positions[:, None],
                use_cache=False,
                return_dict=True,
            )
        self._rows = None
        if not self._last_hidden_was_cut:
            raise BlinkError(f"{type(self.model).__name__} does not run its base model")
        return output.logits[:, 0].float()

    def _keep_rows(self, _module: Any, _arguments: Any, output: Any) -> Any:
        """Leave only the tokens whose logits are wanted before the model's own head sees them."""
        self._last_hidden_was_cut = True
        kept = output.last_hidden_state[:, 0].index_select(0, self._rows)
        output.last_hidden_state = kept[:, None]
        return output


def export_decoder(hollow: HollowModel) -> onnx.ModelProto:
    """Trace the model and write it as ONNX, opset 18 in primitive ops; no weight is read.

    Raises:
        BlinkError: the model cannot be traced.
    """
    name = type(hollow.model).__name__
    register_schemas()
    tokens = torch.export.Dim("T", min=1, max=_MAX_TOKENS)
    samples = torch.export.Dim("R", min=1, max=_MAX_TOKENS)
    # Three tensors: the exporter would take one passed twice for one input.
    examples = tuple(torch.zeros(n, dtype=torch.int64, device="meta") for n in (5, 5, 3))
    with interfaces(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(
                StepOfModel(hollow.model),
                examples,
                dynamic_shapes={
                    "input_ids": {0: tokens},
                    "positions": {0: tokens},
                    "rows": {0: samples},
                },
                strict=False,
            )
            program = _onnx_from_exported(exported)
        except BlinkError:
            raise
        except Exception as error:
            cause = _blink_cause(error)
            if cause:
                raise cause from error
            raise BlinkError(
                f"{name} cannot be exported to ONNX: {_first_line(error)}", log=str(error)
            ) from error
    return _proto_from_program(program)


def register_schemas() -> None:
    """Tell onnx the signatures of the cut ops; done once per process."""
    schema = onnx.defs.OpSchema
    if onnx.defs.has("PagedAttention", domain="blink"):
        return
    floats = ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")
    parameter = schema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    attribute = schema.Attribute
    kinds = onnx.defs.OpSchema.AttrType
    onnx.defs.register_schema(
        schema(
            "PagedAttention",
            "blink",
            1,
            inputs=[
                parameter("q", "T"),
                parameter("k", "T"),
                parameter("v", "T"),
                parameter("positions", "tensor(int64)"),
                parameter("sinks", "T", param_option=optional),
            ],
            outputs=[parameter("out", "T")],
            type_constraints=[floats],
            attributes=[
                attribute("layer", kinds.INT, required=False),
                attribute("scale", kinds.FLOAT),
                attribute("window", kinds.INT),
                attribute("softcap", kinds.FLOAT),
            ],
        )
    )
    onnx.defs.register_schema(
        schema(
            "MoeExperts",
            "blink",
            1,
            inputs=[
                parameter("x", "T"),
                parameter("ids", "tensor(int64)"),
                parameter("weights", "T"),
                parameter("gate_up", "T"),
                parameter("down", "T"),
            ],
            outputs=[parameter("out", "T")],
            type_constraints=[floats],
            attributes=[
                attribute("layer", kinds.INT, required=False),
                attribute("activation", kinds.STRING),
            ],
        )
    )


def _onnx_from_exported(exported: Any) -> Any:
    import onnxscript

    domain = onnxscript.values.Opset("blink", 1)

    def translate_attention(
        q: Any,
        k: Any,
        v: Any,
        positions: Any,
        sinks: Any,
        scale: float,
        window: int,
        softcap: float,
    ) -> Any:
        inputs = (q, k, v, positions) if sinks is None else (q, k, v, positions, sinks)
        return domain.PagedAttention(*inputs, scale=scale, window=window, softcap=softcap)

    def translate_experts(
        x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, activation: str
    ) -> Any:
        return domain.MoeExperts(x, ids, weights, gate_up, down, activation=activation)

    with skip_needless_decompositions():
        return torch.onnx.export(
            exported,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            custom_translation_table={
                torch.ops.blink.paged_attention.default: translate_attention,
                torch.ops.blink.moe_experts.default: translate_experts,
            },
        )


def _proto_from_program(program: Any) -> onnx.ModelProto:
    """Turn parameters and buffers into graph inputs by their names in the checkpoint."""
    import onnx_ir

    graph = program.model.graph
    for name, value in list(graph.initializers.items()):
        if not name.startswith(_PREFIX):
            continue
        del graph.initializers[name]
        value.const_value = None
        value.name = name.removeprefix(_PREFIX)
        graph.inputs.append(value)
    proto: onnx.ModelProto = onnx_ir.to_proto(program.model)
    for node in proto.graph.node:
        del node.metadata_props[:]
    return proto


def _blink_cause(error: BaseException | None) -> BlinkError | None:
    while error is not None:
        if isinstance(error, BlinkError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


logging.getLogger("torch.onnx").setLevel(logging.ERROR)
