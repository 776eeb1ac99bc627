"""Tiny random decoders around attention ops, laid out as genai's builder and exporters do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB = 61
MS = "com.microsoft"


@dataclass(frozen=True, kw_only=True)
class OpModel:
    """What to build. `attention` is "gqa", "mha", "standard" or "standard_flat"."""

    attention: str = "gqa"
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    intermediate: int = 48
    positions: int = 64
    fp16: bool = False
    packed: bool = False
    qkv_bias: bool = False
    rotary: str = "op"  # "op": do_rotary; "node": a RotaryEmbedding in front; "none"
    interleaved: bool = False
    rotary_fraction: float = 1.0
    qk_norm: bool = False
    window: int = -1
    softcap: float = 0.0
    scale: float = 0.0
    head_sink: bool = False
    smooth_softmax: bool = False
    bits: int = 0  # quantized matrices
    zero_points: bool = False
    fused_norm: bool = True
    is_causal: bool = True  # standard Attention: attribute instead of a mask
    longrope_at: int = 0  # If between two tables, by total length
    last_token_only: bool = False
    logit_softcap: float = 0.0
    opset: int = 23
    external_data: bool = False
    open_head_dim: bool = False  # as newer builders write their KV inputs

    @property
    def np_dtype(self) -> type:
        return np.float16 if self.fp16 else np.float32


class OpModelBuilder:
    """Collects nodes and initializers; `build` writes the file."""

    def __init__(self, config: OpModel) -> None:
        self.config = config
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)
        self.float_type = TensorProto.FLOAT16 if config.fp16 else TensorProto.FLOAT
        self._count = 0

    def weight(self, name: str, values: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def matrix(self, name: str, *shape: int) -> str:
        values = self.random.standard_normal(shape) / np.sqrt(shape[0])
        return self.weight(name, values.astype(self.config.np_dtype))

    def vector(self, name: str, size: int, around: float = 0.0) -> str:
        values = around + 0.3 * self.random.standard_normal(size)
        return self.weight(name, values.astype(self.config.np_dtype))

    def ints(self, *values: int) -> str:
        self._count += 1
        return self.weight(f"ints_{self._count}", np.array(values, dtype=np.int64))

    def node(
        self, op: str, inputs: list[str], outputs: list[str] | str, domain: str = "", **kw
    ) -> str:  # type: ignore[no-untyped-def]
        names = [outputs] if isinstance(outputs, str) else outputs
        node = helper.make_node(op, inputs, names, name=f"/{names[0]}/{op}", domain=domain, **kw)
        self.nodes.append(node)
        return names[0]

    def linear(self, x: str, name: str, n_in: int, n_out: int, bias: bool = False) -> str:
        c = self.config
        if c.bits:
            out = self._quantized(x, name, n_in, n_out)
        else:
            out = self.node(
                "MatMul", [x, self.matrix(f"{name}.weight", n_in, n_out)], f"{name}.out"
            )
        if bias:
            out = self.node("Add", [out, self.vector(f"{name}.bias", n_out)], f"{name}.biased")
        return out

    def _quantized(self, x: str, name: str, n_in: int, n_out: int) -> str:
        c, block = self.config, 16
        blocks = -(-n_in // block)
        size = block * c.bits // 8
        q = self.random.integers(0, 256, size=(n_out, blocks, size), dtype=np.uint8)
        scales = 0.02 + 0.02 * self.random.random((n_out, blocks))
        inputs = [x, self.weight(f"{name}.q", q)]
        inputs.append(self.weight(f"{name}.scales", scales.astype(c.np_dtype)))
        if c.zero_points:
            packed = -(-blocks * c.bits // 8)
            zeros = self.random.integers(0, 256, size=(n_out, packed), dtype=np.uint8)
            inputs.append(self.weight(f"{name}.zeros", zeros))
        return self.node(
            "MatMulNBits", inputs, f"{name}.out", MS, K=n_in, N=n_out, bits=c.bits, block_size=block
        )

    def rope_tables(self, base: float = 10000.0) -> tuple[str, str]:
        c = self.config
        half = int(c.head_dim * c.rotary_fraction) // 2
        angles = np.outer(np.arange(c.positions), base ** (-np.arange(half) / half))
        names = (f"cos_cache_{int(base)}", f"sin_cache_{int(base)}")
        self.weight(names[0], np.cos(angles).astype(c.np_dtype))
        self.weight(names[1], np.sin(angles).astype(c.np_dtype))
        return names

    def switched_tables(self, total: str) -> tuple[str, str]:
        """Build an If between two tables, as Phi-3's long rope is exported."""
        short, long = self.rope_tables(10000.0), self.rope_tables(500.0)
        branches = {}
        for key, tables in (("then_branch", long), ("else_branch", short)):
            nodes = [
                helper.make_node("Identity", [table], [f"{key}_{what}"])
                for table, what in zip(tables, ("cos", "sin"), strict=True)
            ]
            outputs = [
                helper.make_tensor_value_info(f"{key}_{what}", self.float_type, None)
                for what in ("cos", "sin")
            ]
            branches[key] = helper.make_graph(nodes, key, [], outputs)
        limit = self.weight("longrope_limit", np.array(self.config.longrope_at, dtype=np.int32))
        condition = self.node("Greater", [total, limit], "is_long")
        self.node("If", [condition], ["cos_cache", "sin_cache"], **branches)
        return "cos_cache", "sin_cache"

    def norm(self, x: str, name: str, skip: str = "") -> tuple[str, str]:
        """Return (normed, sum) of x and skip."""
        c = self.config
        weight = self.vector(f"{name}.weight", c.hidden, 1.0)
        if skip and c.fused_norm:
            outputs = [f"{name}.out", "", "", f"{name}.sum"]
            self.node(
                "SkipSimplifiedLayerNormalization", [skip, x, weight], outputs, MS, epsilon=1e-6
            )
            return outputs[0], outputs[3]
        total = self.node("Add", [skip, x], f"{name}.sum") if skip else x
        op = "SimplifiedLayerNormalization" if c.fused_norm else "RMSNormalization"
        out = self.node(op, [total, weight], f"{name}.out", axis=-1, epsilon=1e-6)
        return out, total

    def layer(self, index: int, x: str, skip: str, shared: dict[str, str]) -> tuple[str, str]:
        c, p = self.config, f"layers.{index}"
        normed, skip = self.norm(x, f"{p}.input_norm", skip)
        q_size, kv_size = c.heads * c.head_dim, c.kv_heads * c.head_dim
        if c.packed:
            q = self.linear(normed, f"{p}.qkv", c.hidden, q_size + 2 * kv_size, c.qkv_bias)
            k = v = ""
        else:
            q = self.linear(normed, f"{p}.q", c.hidden, q_size, c.qkv_bias)
            k = self.linear(normed, f"{p}.k", c.hidden, kv_size, c.qkv_bias)
            v = self.linear(normed, f"{p}.v", c.hidden, kv_size, c.qkv_bias)
        if c.rotary == "node":
            q, k = (
                self._rotary(tensor, heads, f"{p}.{what}.rotated", shared)
                for tensor, heads, what in ((q, c.heads, "q"), (k, c.kv_heads, "k"))
            )
        out = self._attention(index, q, k, v, shared)
        out = self.linear(out, f"{p}.o", q_size, c.hidden)
        normed, skip = self.norm(out, f"{p}.post_norm", skip)
        gate = self.linear(normed, f"{p}.gate", c.hidden, c.intermediate)
        up = self.linear(normed, f"{p}.up", c.hidden, c.intermediate)
        sigmoid = self.node("Sigmoid", [gate], f"{p}.sigmoid")
        act = self.node("Mul", [gate, sigmoid], f"{p}.silu")
        product = self.node("Mul", [act, up], f"{p}.act")
        return self.linear(product, f"{p}.down", c.intermediate, c.hidden), skip

    def _rotary(self, x: str, heads: int, name: str, shared: dict[str, str]) -> str:
        c = self.config
        if c.attention.startswith("standard"):
            inputs = [x, shared["cos"], shared["sin"], "position_ids"]
            return self.node(
                "RotaryEmbedding", inputs, name, num_heads=heads, interleaved=int(c.interleaved)
            )
        return self.node(
            "RotaryEmbedding",
            [x, "position_ids", shared["cos"], shared["sin"]],
            name,
            MS,
            num_heads=heads,
            interleaved=int(c.interleaved),
            rotary_embedding_dim=int(c.head_dim * c.rotary_fraction)
            if c.rotary_fraction < 1
            else 0,
        )

    def _attention(self, index: int, q: str, k: str, v: str, shared: dict[str, str]) -> str:
        c = self.config
        past = [f"past_key_values.{index}.{what}" for what in ("key", "value")]
        present = [f"present.{index}.{what}" for what in ("key", "value")]
        out = f"layers.{index}.attention"
        extra = {"scale": c.scale} if c.scale else {}
        if c.attention == "gqa":
            rotary = [shared["cos"], shared["sin"]] if c.rotary == "op" else ["", ""]
            inputs = [q, k, v, *past, shared["seqlens_k"], shared["total"], *rotary]
            if c.head_sink:
                inputs += ["", "", self.vector(f"layers.{index}.sinks", c.heads)]
            if c.qk_norm:
                inputs += [""] * (14 - len(inputs))
                inputs += [
                    self.vector(f"layers.{index}.{what}_norm", c.head_dim, 1.0)
                    for what in ("q", "k")
                ]
                extra["qk_norm_epsilon"] = 1e-5
            if c.smooth_softmax:
                extra["smooth_softmax"] = 1
            self.node(
                "GroupQueryAttention",
                inputs,
                [out, *present],
                MS,
                num_heads=c.heads,
                kv_num_heads=c.kv_heads,
                do_rotary=int(c.rotary == "op"),
                rotary_interleaved=int(c.interleaved),
                local_window_size=c.window,
                softcap=c.softcap,
                **extra,
            )
            return out
        if c.attention == "mha_joined":
            k, v = (
                self._joined(tensor, name, new, f"{out}.{what}")
                for tensor, name, new, what in zip((k, v), past, present, "kv", strict=True)
            )
            inputs = [q, k, v, "", "", shared["mask"]]
            return self.node("MultiHeadAttention", inputs, out, MS, num_heads=c.heads, **extra)
        if c.attention == "mha":
            inputs = [q, k, v, "", "", shared["mask"], *past]
            self.node("MultiHeadAttention", inputs, [out, *present], MS, num_heads=c.heads, **extra)
            return out
        heads = {"q_num_heads": c.heads, "kv_num_heads": c.kv_heads}
        if c.attention == "standard":  # heads apart
            q, k, v = (
                self._apart(t, n, f"{out}.{w}")
                for t, n, w in ((q, c.heads, "q"), (k, c.kv_heads, "k"), (v, c.kv_heads, "v"))
            )
            heads = {}
        inputs = [q, k, v, "" if c.is_causal else shared["mask"], *past]
        if c.softcap:
            extra["softcap"] = c.softcap
        outputs = [out, *present]
        self.node("Attention", inputs, outputs, is_causal=int(c.is_causal), **heads, **extra)
        if c.attention == "standard":
            turned = self.node("Transpose", [out], f"{out}.turned", perm=[0, 2, 1, 3])
            out = self.node(
                "Reshape", [turned, self.ints(0, 0, c.heads * c.head_dim)], f"{out}.flat"
            )
        return out

    def _joined(self, x: str, past: str, present: str, name: str) -> str:
        """Join the cache in front of the op and repeat its heads, as for fp16 on CPU."""
        c = self.config
        self.node("Concat", [past, self._apart(x, c.kv_heads, name)], present, axis=2)
        wide = self.node("Unsqueeze", [present, self.ints(2)], f"{name}.wide")
        times = self.ints(1, 1, c.heads // c.kv_heads, 1, 1)
        repeated = self.node("Expand", [wide, times], f"{name}.repeated")
        shape = self.ints(0, c.heads, -1, c.head_dim)
        heads = self.node("Reshape", [repeated, shape], f"{name}.heads")
        turned = self.node("Transpose", [heads], f"{name}.turned", perm=[0, 2, 1, 3])
        return self.node("Reshape", [turned, self.ints(0, 0, -1)], f"{name}.joined")

    def _apart(self, x: str, heads: int, name: str) -> str:
        split = self.node(
            "Reshape", [x, self.ints(0, 0, heads, self.config.head_dim)], f"{name}.split"
        )
        return self.node("Transpose", [split], f"{name}.apart", perm=[0, 2, 1, 3])

    def shared_inputs(self) -> dict[str, str]:
        """Build lengths, masks and rotary tables, as far as this model uses them."""
        c = self.config
        shared: dict[str, str] = {}
        if c.attention == "gqa":
            total = self.node("ReduceSum", ["attention_mask", self.ints(1)], "mask_sum", keepdims=0)
            less = self.node("Sub", [total, self.ints(1)], "mask_sum_less")
            shared["seqlens_k"] = self.node("Cast", [less], "seqlens_k", to=TensorProto.INT32)
            shape = self.node("Shape", ["attention_mask"], "mask_shape")
            one = self.weight("index_1", np.array(1, dtype=np.int64))
            length = self.node("Gather", [shape, one], "total_length", axis=0)
            shared["total"] = self.node("Cast", [length], "total", to=TensorProto.INT32)
        elif not c.is_causal or c.attention.startswith("mha"):
            shared["mask"] = self._mask()
        if c.rotary != "none":
            tables = self.switched_tables(shared["total"]) if c.longrope_at else self.rope_tables()
            shared["cos"], shared["sin"] = tables
        return shared

    def _mask(self) -> str:
        """Additive causal (or sliding) mask `[1, 1, S, total]` from shapes."""
        zero, one = (self.weight(f"n_{i}", np.array(i, dtype=np.int64)) for i in (0, 1))
        shape = self.node("Shape", ["attention_mask"], "m_shape")
        total = self.node("Gather", [shape, one], "m_total", axis=0)
        ids_shape = self.node("Shape", ["input_ids"], "m_ids_shape")
        seq = self.node("Gather", [ids_shape, one], "m_seq", axis=0)
        past = self.node("Sub", [total, seq], "m_past")
        keys = self.node("Range", [zero, total, one], "m_keys")
        queries = self.node("Range", [past, total, one], "m_queries")
        column = self.node("Unsqueeze", [queries, self.ints(1)], "m_column")
        distance = self.node("Sub", [column, keys], "m_distance")
        hidden = self.node("Less", [distance, zero], "m_future")
        if self.config.window > 0:
            width = self.weight("m_width", np.array(self.config.window, dtype=np.int64))
            far = self.node("GreaterOrEqual", [distance, width], "m_far")
            hidden = self.node("Or", [hidden, far], "m_hidden")
        low = np.finfo(self.config.np_dtype).min
        numbers = [
            self.weight(f"m_{i}", np.array(v, dtype=self.config.np_dtype))
            for i, v in ((0, low), (1, 0))
        ]
        mask = self.node("Where", [hidden, *numbers], "m_mask")
        return self.node("Unsqueeze", [mask, self.ints(0, 1)], "m_mask_4d")

    def build(self, path: Path) -> Path:
        c = self.config
        shared = self.shared_inputs()
        table = self.matrix("embed.weight", VOCAB, c.hidden)
        x = self.node("Gather", [table, "input_ids"], "embed.out")
        skip = ""
        for index in range(c.layers):
            x, skip = self.layer(index, x, skip, shared)
        x, _ = self.norm(x, "final_norm", skip)
        if c.last_token_only:
            x = self.node("Gather", [x, self.ints(-1)], "last_token", axis=1)
        logits = self.linear(x, "lm_head", c.hidden, VOCAB)
        if c.logit_softcap:
            cap = self.weight("cap", np.array(c.logit_softcap, dtype=c.np_dtype))
            small = self.node("Tanh", [self.node("Div", [logits, cap], "l_div")], "l_tanh")
            logits = self.node("Mul", [small, cap], "l_capped")
        self.node("Identity", [logits], "logits")
        return self.save(path)

    def save(self, path: Path) -> Path:
        """Write the file, leaving out inputs that nothing reads."""
        c, info = self.config, helper.make_tensor_value_info
        integers = TensorProto.INT64
        kv = ["batch", c.kv_heads, "past", "kv_cache_dim" if c.open_head_dim else c.head_dim]
        inputs = [
            info("input_ids", integers, ["batch", "seq"]),
            info("attention_mask", integers, ["batch", "total"]),
            info("position_ids", integers, ["batch", "seq"]),
        ]
        outputs = [info("logits", self.float_type, ["batch", None, VOCAB])]
        for index in range(c.layers):
            for what in ("key", "value"):
                inputs.append(info(f"past_key_values.{index}.{what}", self.float_type, kv))
                present = ["batch", c.kv_heads, "total", c.head_dim]
                outputs.append(info(f"present.{index}.{what}", self.float_type, present))
        read = {name for node in self.nodes for name in node.input}
        inputs = [i for i in inputs if i.name in read]
        graph = helper.make_graph(self.nodes, "tiny", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", c.opset), helper.make_opsetid(MS, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        if c.external_data:
            onnx.save_model(
                model,
                str(path),
                save_as_external_data=True,
                location=path.name + ".data",
                size_threshold=64,
            )
        else:
            onnx.save_model(model, str(path))
        return path


def build_op_model(path: Path, **options: object) -> Path:
    """Write the model that `options` of `OpModel` describe."""
    return OpModelBuilder(OpModel(**options)).build(path)  # type: ignore[arg-type]
