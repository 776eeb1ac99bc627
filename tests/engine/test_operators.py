"""Every operator of a segment against onnx's reference, at odd sizes and random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.program import GemmKernel
from blinkc.errors import BlinkError
from blinkc.surgery.segments import Segment
from tests.engine.segment_runner import SegmentLibrary, build_library, make_segment

TOKENS = 5
SIZE = 19


@dataclass
class Case:
    """A graph and how its inputs are drawn."""

    nodes: list[onnx.NodeProto]
    inputs: dict[str, tuple[str, tuple[int, ...], str]] = field(
        default_factory=lambda: {"x": ("tokens", (SIZE,), "fp32")}
    )
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[str, tuple[int, ...], str]] = field(
        default_factory=lambda: {"y": ("tokens", (SIZE,), "fp32")}
    )
    init: dict[str, np.ndarray] = field(default_factory=dict)
    low: float = -3.0
    high: float = 3.0
    max_int: int = 7
    tolerance: float = 2e-6


def node(op: str, inputs: str, outputs: str = "y", **attributes: object) -> onnx.NodeProto:
    """Make a node; names are separated by spaces, a dash leaves an input out."""
    names = ["" if n == "-" else n for n in inputs.split()]
    return helper.make_node(op, names, outputs.split(), **attributes)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


TWO = {"x": ("tokens", (SIZE,), "fp32"), "z": ("tokens", (SIZE,), "fp32")}
CASES: dict[str, Case] = {}

_UNARY = """Neg Abs Exp Sin Cos Tanh Erf Sigmoid Floor Ceil Round Sign Relu Softplus Elu LeakyRelu
    HardSigmoid HardSwish Identity"""
for _op in _UNARY.split():
    CASES[_op] = Case([node(_op, "x")])
for _op in ("Sqrt", "Log", "Reciprocal"):
    CASES[_op] = Case([node(_op, "x")], low=0.01, high=9.0)
for _op in ("Add", "Sub", "Mul", "Div", "Max", "Min"):
    CASES[_op] = Case([node(_op, "x z")], inputs=TWO)
CASES["ExpWide"] = Case([node("Exp", "x")], low=-87.0, high=88.0, tolerance=4e-7)
CASES["TanhSmall"] = Case([node("Tanh", "x")], low=-0.7, high=0.7, tolerance=3e-7)
CASES["Pow2"] = Case([node("Pow", "x e")], init={"e": f32(2.0)})
CASES["PowHalf"] = Case([node("Pow", "x e")], init={"e": f32(0.5)}, low=0.1)
CASES["PowMinusHalf"] = Case([node("Pow", "x e")], init={"e": f32(-0.5)}, low=0.1)
CASES["PowAny"] = Case([node("Pow", "x z")], inputs=TWO, low=0.1)
CASES["Fmod"] = Case([node("Mod", "x z", fmod=1)], inputs=TWO)
CASES["Clip"] = Case([node("Clip", "x a b")], init={"a": np.float32(-1), "b": np.float32(2)})
CASES["ClipHigh"] = Case([node("Clip", "x - b")], init={"b": np.float32(2)})
CASES["Gelu"] = Case([node("Gelu", "x")], tolerance=1e-6)
CASES["GeluTanh"] = Case([node("Gelu", "x", approximate="tanh")], tolerance=1e-6)
CASES["Silu"] = Case([node("Sigmoid", "x", "s"), node("Mul", "x s")])
CASES["Where"] = Case(
    [node("Greater", "x z", "c"), node("Less", "x k", "d"), node("Or", "c d", "e"),
     node("Not", "e", "f"), node("And", "f c", "g"), node("Xor", "g e", "h"),
     node("Where", "h x z")],
    inputs=TWO, init={"k": f32(-1.0)},
)  # fmt: skip
CASES["Comparisons"] = Case(
    [node("GreaterOrEqual", "x z", "a"), node("LessOrEqual", "x z", "b"), node("Equal", "a b", "c"),
     node("Cast", "c", "y", to=1)],
    inputs=TWO,
)  # fmt: skip
CASES["CastToInt"] = Case([node("Cast", "x", "i", to=7), node("Cast", "i", to=1)])
CASES["BroadcastWeight"] = Case([node("Mul", "x w")], weights={"w": (SIZE,)})
CASES["WeightPlusOne"] = Case(
    [node("Add", "w one", "v"), node("Mul", "x v")], weights={"w": (SIZE,)}, init={"one": f32(1.0)}
)
CASES["Table"] = Case([node("Mul", "x t")], init={"t": np.arange(SIZE, dtype=np.float32) ** 2})

_HEADS = {"x": ("tokens", (3 * 8,), "fp32")}
for _op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2",
            "ReduceSumSquare", "ReduceL1", "ReduceLogSumExp"):  # fmt: skip
    CASES[_op] = Case(
        [node("Reshape", "x s", "h"), node(_op, "h a", keepdims=0)],
        inputs=_HEADS, init={"s": ints(-1, 3, 8), "a": ints(2)},
        outputs={"y": ("tokens", (3,), "fp32")}, tolerance=1e-5,
    )  # fmt: skip
CASES["ReduceMiddle"] = Case(
    [node("Reshape", "x s", "h"), node("ReduceSum", "h a", keepdims=0)],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "a": ints(1)},
    outputs={"y": ("tokens", (8,), "fp32")},
)  # fmt: skip
CASES["ReduceAllInner"] = Case(
    [node("Reshape", "x s", "h"), node("ReduceMax", "h a", "m", keepdims=1),
     node("Reshape", "m t", "y")],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "a": ints(1, 2), "t": ints(-1, 1)},
    outputs={"y": ("tokens", (1,), "fp32")},
)  # fmt: skip
CASES["ReduceOfConcat"] = Case(
    [node("Concat", "x z", "c", axis=1), node("ReduceSum", "c a", keepdims=1)],
    inputs=TWO, init={"a": ints(1)}, outputs={"y": ("tokens", (1,), "fp32")},
)  # fmt: skip
CASES["Softmax"] = Case([node("Softmax", "x", axis=-1)])
CASES["LogSoftmax"] = Case([node("LogSoftmax", "x", axis=-1)])
CASES["SoftmaxMiddle"] = Case(
    [node("Reshape", "x s", "h"), node("Softmax", "h", "p", axis=1), node("Reshape", "p t")],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "t": ints(-1, 24)},
    outputs={"y": ("tokens", (24,), "fp32")},
)  # fmt: skip
CASES["LayerNorm"] = Case(
    [node("LayerNormalization", "x w b", axis=-1, epsilon=1e-5)],
    weights={"w": (SIZE,), "b": (SIZE,)}, tolerance=1e-5,
)  # fmt: skip
CASES["RmsNorm"] = Case(
    [node("Mul", "x x", "q"), node("ReduceMean", "q a", "m", keepdims=1), node("Add", "m e", "n"),
     node("Sqrt", "n", "r"), node("Reciprocal", "r", "i"), node("Mul", "x i", "v"),
     node("Mul", "w v")],
    weights={"w": (SIZE,)}, init={"a": ints(-1), "e": f32(1e-6)}, tolerance=1e-5,
)  # fmt: skip
CASES["HeadNorm"] = Case(
    [node("Reshape", "x s", "h"), node("Mul", "h h", "q"),
     node("ReduceMean", "q a", "m", keepdims=1), node("Sqrt", "m", "r"), node("Div", "h r", "v"),
     node("Mul", "v w", "u"), node("Reshape", "u t")],
    inputs=_HEADS, weights={"w": (8,)}, init={"s": ints(-1, 3, 8), "a": ints(-1),
    "t": ints(-1, 24)}, outputs={"y": ("tokens", (24,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["TopK"] = Case(
    [node("TopK", "x k", "v i", axis=-1), node("Cast", "i", "f", to=1),
     node("Concat", "v f", axis=1)],
    init={"k": ints(4)}, outputs={"y": ("tokens", (8,), "fp32")},
)  # fmt: skip
CASES["TopKOutputs"] = Case(
    [node("TopK", "x k", "v i", axis=-1)], init={"k": ints(4)},
    outputs={"v": ("tokens", (4,), "fp32"), "i": ("tokens", (4,), "int64")},
)  # fmt: skip
CASES["TopKOfSigmoidTwice"] = Case(
    [node("Sigmoid", "x", "p"), node("TopK", "p k", "v i", axis=-1),
     node("GatherElements", "x i", "g", axis=1), node("ReduceSum", "v a", "t", keepdims=1),
     node("Div", "v t", "n"), node("Add", "n g", "y")],
    init={"k": ints(3), "a": ints(-1)}, outputs={"y": ("tokens", (3,), "fp32")},
)  # fmt: skip
CASES["ArgMax"] = Case(
    [node("ArgMax", "x", axis=1, keepdims=0)], outputs={"y": ("tokens", (), "int64")}
)
CASES["ArgMin"] = Case(
    [node("ArgMin", "x", axis=1, keepdims=1)], outputs={"y": ("tokens", (1,), "int64")}
)
CASES["CumSum"] = Case([node("CumSum", "x a")], init={"a": np.array(1, np.int64)}, tolerance=1e-5)
CASES["CumSumReverseExclusive"] = Case(
    [node("CumSum", "x a", reverse=1, exclusive=1)], init={"a": np.array(1, np.int64)},
    tolerance=1e-5,
)  # fmt: skip

CASES["Embedding"] = Case(
    [node("Gather", "w ids", axis=0)], inputs={"ids": ("tokens", (), "int64")},
    weights={"w": (7, 6)}, outputs={"y": ("tokens", (6,), "fp32")},
)  # fmt: skip
CASES["EmbeddingsOfSeveral"] = Case(
    [node("Gather", "w ids", "g", axis=0), node("ReduceSum", "g a", keepdims=0)],
    inputs={"ids": ("tokens", (3,), "int64")},
    weights={"w": (7, 6)}, init={"a": ints(1)}, outputs={"y": ("tokens", (6,), "fp32")},
)  # fmt: skip
CASES["LearnedPositions"] = Case(
    [node("Gather", "w ids", "e", axis=0), node("Add", "pos two", "p"),
     node("Gather", "u p", "f", axis=0), node("Add", "e f")],
    inputs={"ids": ("tokens", (), "int64"), "pos": ("tokens", (), "int64")},
    weights={"w": (7, 6), "u": (9, 6)}, init={"two": np.array(2, np.int64)},
    outputs={"y": ("tokens", (6,), "fp32")},
)  # fmt: skip
CASES["SampleRows"] = Case(
    [node("Mul", "x x", "q"), node("Gather", "q rows", "g", axis=0), node("Neg", "g")],
    inputs={"x": ("tokens", (SIZE,), "fp32"), "rows": ("samples", (), "int64")},
    outputs={"y": ("samples", (SIZE,), "fp32")}, max_int=TOKENS,
)  # fmt: skip
CASES["GatherNDRows"] = Case(
    [node("Unsqueeze", "rows a", "r"), node("GatherND", "x r")],
    inputs={"x": ("tokens", (SIZE,), "fp32"), "rows": ("samples", (), "int64")},
    outputs={"y": ("samples", (SIZE,), "fp32")}, init={"a": ints(1)}, max_int=TOKENS,
)  # fmt: skip
CASES["GatherColumns"] = Case(
    [node("Gather", "x c", axis=1)], init={"c": ints(3, 0, 18, 3)},
    outputs={"y": ("tokens", (4,), "fp32")},
)  # fmt: skip
CASES["GatherOneColumn"] = Case(
    [node("Gather", "x c", axis=1)], init={"c": np.array(-2, np.int64)},
    outputs={"y": ("tokens", (), "fp32")},
)  # fmt: skip
CASES["ScatterElements"] = Case(
    [node("TopK", "x k", "v i", axis=-1), node("Mul", "x zero", "o"),
     node("ScatterElements", "o i v", axis=1)],
    init={"k": ints(4), "zero": f32(0.0)},
)  # fmt: skip
CASES["ScatterAdd"] = Case(
    [node("ScatterElements", "x i u", axis=1, reduction="add")],
    inputs={"x": ("tokens", (SIZE,), "fp32"), "i": ("tokens", (6,), "int64"),
            "u": ("tokens", (6,), "fp32")},
)  # fmt: skip
CASES["OneHot"] = Case(
    [node("OneHot", "i d v", axis=-1)], inputs={"i": ("tokens", (3,), "int64")},
    init={"d": np.array(7, np.int64), "v": f32(-1.0, 2.0)},
    outputs={"y": ("tokens", (3, 7), "fp32")},
)  # fmt: skip
CASES["Slices"] = Case(
    [node("Slice", "x b e a s", "p"), node("Slice", "x b2 e2 a s2", "q"),
     node("Concat", "q p", axis=1)],
    init={"b": ints(2), "e": ints(11), "a": ints(1), "s": ints(3), "b2": ints(-4), "e2": ints(-9),
          "s2": ints(-1)},
    outputs={"y": ("tokens", (8,), "fp32")},
)  # fmt: skip
CASES["Split"] = Case(
    [node("Split", "x s", "a b c", axis=1), node("Mul", "a c", "d"), node("Concat", "d b", axis=1)],
    init={"s": ints(6, 7, 6)}, outputs={"y": ("tokens", (13,), "fp32")},
)  # fmt: skip
CASES["Tile"] = Case(
    [node("Tile", "x r")], init={"r": ints(1, 3)}, outputs={"y": ("tokens", (57,), "fp32")}
)
CASES["ExpandAndTranspose"] = Case(
    [node("Reshape", "x s", "h"), node("Transpose", "h", "t", perm=[0, 2, 1]),
     node("Unsqueeze", "t a", "u"), node("Expand", "u e", "v"), node("Reshape", "v r")],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "a": ints(1), "e": ints(1, 2, 8, 3),
    "r": ints(-1, 48)},
    outputs={"y": ("tokens", (48,), "fp32")},
)  # fmt: skip
CASES["FlatConcatInsideHeads"] = Case(
    [node("Reshape", "x s", "h"), node("Neg", "h", "n"), node("Concat", "n h", "c", axis=2),
     node("Reshape", "c r", "f"), node("Exp", "f")],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "r": ints(-1, 48)},
    outputs={"y": ("tokens", (48,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["ConstantOfShape"] = Case(
    [node("Shape", "x", "s"), node("ConstantOfShape", "s", "c",
          value=helper.make_tensor("v", 1, [1], [2.5])), node("Add", "x c")],
)  # fmt: skip
CASES["DynamicReshape"] = Case(
    [node("Shape", "x", "s"), node("Gather", "s zero", "n", axis=0),
     node("Unsqueeze", "n zero1", "u"),
     node("Concat", "u rest", "t", axis=0), node("Reshape", "x t", "h"),
     node("ReduceMax", "h a", keepdims=0)],
    inputs=_HEADS, init={"zero": np.array(0, np.int64), "zero1": ints(0), "rest": ints(3, 8),
                         "a": ints(1)},
    outputs={"y": ("tokens", (8,), "fp32")},
)  # fmt: skip
CASES["Rope"] = Case(
    [node("Cast", "pos", "p", to=1), node("Unsqueeze", "p one", "pu"), node("Mul", "pu f", "ang"),
     node("Concat", "ang ang", "emb", axis=1), node("Cos", "emb", "c1"), node("Sin", "emb", "s1"),
     node("Unsqueeze", "c1 one", "c"), node("Unsqueeze", "s1 one", "s"),
     node("Reshape", "x sh", "h"), node("Slice", "h z4 z8 two", "h2"), node("Neg", "h2", "hn"),
     node("Slice", "h z0 z4 two", "h1"), node("Concat", "hn h1", "rot", axis=2),
     node("Mul", "h c", "a"), node("Mul", "rot s", "b"), node("Add", "a b", "r"),
     node("Reshape", "r back")],
    inputs={"x": ("tokens", (24,), "fp32"), "pos": ("tokens", (), "int64")},
    weights={"f": (4,)},
    init={"one": ints(1), "sh": ints(-1, 3, 8), "z0": ints(0), "z4": ints(4), "z8": ints(8),
          "two": ints(2), "back": ints(-1, 24)},
    outputs={"y": ("tokens", (24,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["InterleavedRope"] = Case(
    [node("Reshape", "x sh", "h"), node("Slice", "h z0 big last st", "even"),
     node("Slice", "h z1 big last st", "odd"), node("Neg", "odd", "no"),
     node("Unsqueeze", "no last", "u1"), node("Unsqueeze", "even last", "u2"),
     node("Concat", "u1 u2", "cat", axis=-1), node("Reshape", "cat back")],
    inputs=_HEADS,
    init={"sh": ints(-1, 3, 8), "z0": ints(0), "z1": ints(1), "big": ints(2**62), "last": ints(-1),
          "st": ints(2), "back": ints(-1, 24)},
    outputs={"y": ("tokens", (24,), "fp32")},
)  # fmt: skip
CASES["Gemm"] = Case(
    [node("Gemm", "x w b", transB=1)], weights={"w": (37, SIZE), "b": (37,)},
    outputs={"y": ("tokens", (37,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["MatMulTransposed"] = Case(
    [node("Transpose", "w", "t", perm=[1, 0]), node("MatMul", "x t", "p"), node("Add", "p b")],
    weights={"w": (16, SIZE), "b": (16,)}, outputs={"y": ("tokens", (16,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["MatMulPlain"] = Case(
    [node("MatMul", "x w")], weights={"w": (SIZE, 33)}, outputs={"y": ("tokens", (33,), "fp32")},
    tolerance=1e-5,
)  # fmt: skip
CASES["GemmAlphaBeta"] = Case(
    [node("Gemm", "x w b", transB=1, alpha=0.5, beta=2.0)], weights={"w": (9, SIZE), "b": (9,)},
    outputs={"y": ("tokens", (9,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["GemmChain"] = Case(
    [node("Gemm", "x w", "a", transB=1), node("Gemm", "a v", "b", transB=1),
     node("Add", "b x", "c"),
     node("Mul", "c c", "d"), node("Gemm", "d w", "e", transB=1), node("Sub", "e a")],
    weights={"w": (SIZE, SIZE), "v": (SIZE, SIZE)}, low=-0.7, high=0.7, tolerance=1e-4,
)  # fmt: skip
CASES["GemmOfSlice"] = Case(
    [node("Slice", "x b e a", "s"), node("Gemm", "s w", transB=1)], weights={"w": (5, 8)},
    init={"b": ints(3), "e": ints(11), "a": ints(1)}, outputs={"y": ("tokens", (5,), "fp32")},
    tolerance=1e-5,
)  # fmt: skip
CASES["HeadsTimesWeight"] = Case(
    [node("Reshape", "x s", "h"), node("MatMul", "h w", "m"), node("Reshape", "m r")],
    inputs=_HEADS, weights={"w": (8, 5)}, init={"s": ints(-1, 3, 8), "r": ints(-1, 15)},
    outputs={"y": ("tokens", (15,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["RowTimesRow"] = Case(
    [node("Reshape", "x s", "h"), node("Transpose", "h", "t", perm=[0, 2, 1]),
     node("MatMul", "h t", "m"), node("Reshape", "m r")],
    inputs=_HEADS, init={"s": ints(-1, 3, 8), "r": ints(-1, 9)},
    outputs={"y": ("tokens", (9,), "fp32")}, tolerance=1e-5,
)  # fmt: skip
CASES["SameOutputTwice"] = Case(
    [node("Exp", "x", "y"), node("Identity", "y", "z"), node("Neg", "y", "v")],
    outputs={k: ("tokens", (SIZE,), "fp32") for k in ("y", "z", "v")},
)  # fmt: skip
CASES["InputAsOutput"] = Case(
    [node("Identity", "x", "y"), node("Gemm", "x w", "g", transB=1), node("Identity", "g", "h")],
    weights={"w": (3, SIZE)}, tolerance=1e-5,
    outputs={"y": ("tokens", (SIZE,), "fp32"), "g": ("tokens", (3,), "fp32"),
             "h": ("tokens", (3,), "fp32")},
)  # fmt: skip
CASES["RouterOfExperts"] = Case(
    [node("Gemm", "x w", "l", transB=1), node("Softmax", "l", "p", axis=-1),
     node("TopK", "p k", "v i", axis=-1), node("ReduceSum", "v a", "s", keepdims=1),
     node("Div", "v s", "n")],
    weights={"w": (8, SIZE)}, init={"k": ints(2), "a": ints(-1)},
    outputs={"i": ("tokens", (2,), "int64"), "n": ("tokens", (2,), "fp32")}, tolerance=1e-5,
)  # fmt: skip


def segment_of(name: str) -> Segment:
    case = CASES[name]
    return make_segment(name, case.nodes, case.inputs, case.weights, case.outputs, case.init)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SegmentLibrary]:
    yield build_library([segment_of(n) for n in CASES], tmp_path_factory.mktemp("operators"))


def draw(case: Case, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draw inputs and weights."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for name, (rows, shape, dtype) in case.inputs.items():
        full = (TOKENS if rows == "tokens" else 3, *shape)
        if dtype == "int64":
            inputs[name] = rng.integers(0, case.max_int, full)
        else:
            inputs[name] = rng.uniform(case.low, case.high, full).astype(np.float32)
    weights = {
        name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in case.weights.items()
    }
    return inputs, weights


@pytest.mark.parametrize("name", CASES)
def test_operator_equals_reference(library: SegmentLibrary, name: str) -> None:
    case = CASES[name]
    inputs, weights = draw(case, 1)
    expected = ReferenceEvaluator(segment_of(name).model).run(None, {**inputs, **weights})
    got = library.run(name, inputs, weights, num_tokens=TOKENS, num_rows=3, num_threads=2)
    for value, reference in zip(got, expected, strict=True):
        shaped = value.reshape(reference.shape)
        np.testing.assert_allclose(shaped, reference, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_bitwise_independent_of_their_batch(library: SegmentLibrary, name: str) -> None:
    case = CASES[name]
    if any(rows != "tokens" for rows, _, _ in (*case.inputs.values(), *case.outputs.values())):
        pytest.skip("a segment over samples has no rows of its own")
    inputs, weights = draw(case, 2)
    together = library.run(name, inputs, weights, num_tokens=TOKENS, num_threads=2)
    for row in range(TOKENS):
        single = {k: v[row : row + 1] for k, v in inputs.items()}
        alone = library.run(name, single, weights, num_tokens=1)
        for whole, part in zip(together, alone, strict=True):
            assert whole[row].tobytes() == part[0].tobytes()


def test_nan_and_infinity_survive(library: SegmentLibrary) -> None:
    # A NaN must reach the sampler, which fails that request alone; max(NaN, 0) must not hide it.
    x = np.full((1, SIZE), np.nan, np.float32)
    for name in ("Relu", "Exp", "Tanh", "Erf", "Sigmoid", "Softmax", "RmsNorm", "Silu", "Gelu"):
        weights = draw(CASES[name], 3)[1]
        (got,) = library.run(name, {"x": x}, weights, num_tokens=1)
        assert np.isnan(got).all(), name
    far = np.tile(f32(np.inf, -np.inf, 1000.0, -1000.0), 5)[None, :SIZE]
    for name, reference in (("Tanh", np.tanh), ("Exp", np.exp)):
        (got,) = library.run(name, {"x": far}, {}, num_tokens=1)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, reference(far))


def test_bad_ids_stay_inside_their_table(library: SegmentLibrary) -> None:
    weights = draw(CASES["Embedding"], 4)[1]
    ids = np.array([0, 6, 7, 1_000_000, -1, -50, 3])
    (got,) = library.run("Embedding", {"ids": ids}, weights, num_tokens=7)
    np.testing.assert_array_equal(got, weights["w"][[0, 6, 6, 6, 6, 0, 3]])


MIXING = {
    "ReduceTokens": ([node("ReduceSum", "x a", keepdims=1)], {"a": ints(0)}, "token axis"),
    "SoftmaxTokens": ([node("Softmax", "x", axis=0)], {}, "token axis"),
    "TransposedProduct": (
        [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "x t")], {}, "mixes tokens"),
    "SliceTokens": (
        [node("Slice", "x b e a")], {"b": ints(0), "e": ints(1), "a": ints(0)}, "token"),
    "CumSumTokens": ([node("CumSum", "x a")], {"a": np.array(0, np.int64)}, "token axis"),
    "ReshapeMerges": ([node("Reshape", "x s")], {"s": ints(1, -1)}, "mixes tokens"),
    "PairOfTokens": (
        [node("Unsqueeze", "x a", "u"), node("Unsqueeze", "x b", "v"), node("Add", "u v")],
        {"a": ints(0), "b": ints(1)}, "mixes tokens"),
    "Unknown": ([node("Det", "x")], {}, "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_cannot_be_lowered_names_its_node(name: str) -> None:
    nodes, init, message = MIXING[name]
    nodes[-1].name = "the_culprit"
    outputs = {"y": ("tokens", (SIZE,), "fp32")}
    segment = make_segment(name, nodes, CASES["Neg"].inputs, {}, outputs, init)
    with pytest.raises(BlinkError, match=message) as error:
        lower_segment(segment)
    assert "the_culprit" in str(error.value)
    assert error.value.hint


def test_everything_between_products_is_one_kernel() -> None:
    kernels = lower_segment(segment_of("GemmChain")).kernels
    kinds = ["gemm" if isinstance(k, GemmKernel) else "row" for k in kernels]
    assert kinds == ["gemm", "gemm", "row", "gemm", "row"]
    for name in ("RmsNorm", "Rope", "Softmax", "HeadNorm", "TopKOfSigmoidTwice"):
        assert len(lower_segment(segment_of(name)).kernels) == 1, name
