"""`--check` passes what is right and names what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkc.engine.check_segments import SIZES, check_segments
from blinkc.engine.cpu_segments import CpuSegments
from blinkc.errors import BlinkError
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from blinkc.surgery import segment_decoder
from blinkc.surgery.segments import Segment, SegmentedModel
from tests.frontend_onnx.op_models import build_op_model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[SegmentedModel, CpuSegments]:
    folder: Path = tmp_path_factory.mktemp("check")
    path = build_op_model(folder / "model.onnx", qkv_bias=True)
    segmented = segment_decoder(decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64))
    return segmented, CpuSegments(segmented.segments, folder / "segments.so")


def test_cpu_engine_passes(compiled: tuple[SegmentedModel, CpuSegments]) -> None:
    segmented, runner = compiled
    checks = check_segments(segmented, runner)
    assert {check.segment for check in checks} == {s.name for s in segmented.segments}
    assert len(checks) == len(SIZES) * sum(len(s.outputs) for s in segmented.segments)


@pytest.mark.parametrize("fault", ["scaled", "one_element", "nan"])
def test_a_wrong_engine_is_named(compiled: tuple[SegmentedModel, CpuSegments], fault: str) -> None:
    """A runner off in a single element of the last segment is found."""
    segmented, runner = compiled
    last = segmented.segments[-1]

    def faulty(segment: Segment, feeds: Mapping[str, Any]) -> dict[str, Any]:
        outputs = dict(runner(segment, feeds))
        if segment.name == last.name:
            name = segment.outputs[0].name
            changed = outputs[name].copy()
            if fault == "scaled":
                changed *= 1.01
            else:
                changed.flat[-1] += np.nan if fault == "nan" else 0.05
            outputs[name] = changed
        return outputs

    with pytest.raises(BlinkError, match=f"segment {last.name} differs"):
        check_segments(segmented, faulty)
