"""A finished build -> a folder that bench_model.py runs on a GPU machine, without the weights.

`blinkc compile CONFIG --target sm_90 --random-weights 1 -o BUILD`, then
`python3 benchmarks/prepare_model.py BUILD CONFIG FOLDER`. Weights that the model computes (rotary
frequencies)
go along; all others are made on the GPU.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from blinkc.artifacts import WeightFiles, load_segmented
from blinkc.build_folder import BuildFolder
from blinkc.frontend.weights import read_weight

CODE = ("kernels.cu", "kernels.cubin", "scheduler.cubin", "launches.json")


def main() -> None:
    """Copy what the benchmark reads."""
    build_path, config, out = (Path(argument) for argument in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config / "config.json", out / "config.json")
    with BuildFolder(build_path, create=False) as build:
        for name in CODE:
            shutil.copyfile(build.stage_folder("codegen") / name, out / name)
        shutil.copyfile(build.stage_folder("capture") / "plan.json", out / "plan.json")
        segmented = load_segmented(build.stage_folder("segment"), WeightFiles(build))
    inline = {
        reference.name: read_weight(reference)
        for reference in segmented.weights.values()
        if all(part.source == "inline" for part in reference.parts)
    }
    np.savez(out / "inline.npz", **inline)


if __name__ == "__main__":
    main()
