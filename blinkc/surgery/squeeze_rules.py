"""Which rule rewrites which op: the table that squeezing looks up."""

from __future__ import annotations

from blinkc.surgery import squeeze_cut_ops as cut_ops
from blinkc.surgery import squeeze_maths as maths
from blinkc.surgery import squeeze_products as products
from blinkc.surgery import squeeze_views as views
from blinkc.surgery.squeeze_context import Rule

_UNARY = (
    *("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid"),
    *("Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Tanh"),
)
_REDUCTIONS = (
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
    *("ReduceL2", "ReduceSumSquare", "ReduceProd"),
)
_COMPARISONS = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"]

RULES: dict[tuple[str, str], Rule] = {
    **{("", op): maths.rule_elementwise() for op in (*_UNARY, "Max", "Min", "Mod", "PRelu", "Sum")},
    **{("", op): maths.rule_elementwise("bool") for op in (*_COMPARISONS, "IsNaN", "IsInf")},
    **{("", op): maths.rule_reduce for op in _REDUCTIONS},
    ("", "Where"): maths.rule_elementwise(which=1),
    ("", "Mul"): maths.rule_neutral("Mul", 1.0),
    ("", "Div"): maths.rule_neutral("Div", 1.0),
    ("", "Add"): maths.rule_neutral("Add", 0.0),
    ("", "Sub"): maths.rule_neutral("Sub", 0.0),
    ("", "Pow"): maths.rule_pow,
    ("", "Clip"): maths.rule_clip,
    ("", "Cast"): maths.rule_cast,
    ("", "CastLike"): maths.rule_cast_like,
    ("", "Identity"): views.rule_identity,
    ("", "Dropout"): views.rule_identity,
    ("", "Reshape"): views.rule_reshape,
    ("", "Squeeze"): views.rule_squeeze,
    ("", "Unsqueeze"): views.rule_unsqueeze,
    ("", "Flatten"): views.rule_flatten,
    ("", "Expand"): views.rule_expand,
    ("", "ConstantOfShape"): views.rule_constant_of_shape,
    ("", "Transpose"): views.rule_transpose,
    ("", "Softmax"): maths.rule_softmax,
    ("", "LogSoftmax"): maths.rule_softmax,
    ("", "Concat"): views.rule_concat,
    ("", "Slice"): views.rule_slice,
    ("", "Split"): views.rule_split,
    ("", "SplitToSequence"): views.rule_split_to_sequence,
    ("", "SequenceAt"): views.rule_sequence_at,
    ("", "Gather"): views.rule_gather,
    ("", "GatherND"): views.rule_gather_nd,
    ("", "GatherElements"): maths.rule_by_axis(),
    ("", "ScatterElements"): maths.rule_by_axis(),
    ("", "CumSum"): maths.rule_cumsum,
    ("", "TopK"): maths.rule_topk,
    ("", "MatMul"): products.rule_matmul,
    ("", "Gemm"): products.rule_gemm,
    ("", "LayerNormalization"): products.rule_layer_norm,
    ("blink", "PagedAttention"): cut_ops.rule_paged_attention,
    ("blink", "MoeExperts"): cut_ops.rule_moe_experts,
}
