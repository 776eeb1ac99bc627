"""Export and cut a Llama-3-8B-shaped config, random weights: print seconds and peak memory.

python benchmarks/bench_export.py [--layers 32] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def peak_rss_mb() -> int:
    """Return the most memory, in MiB, that this program had in use since it began.

    `ru_maxrss` would count that of the process which started it as well.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux always says VmHWM"
    return int(found[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="bf16")
    arguments = parser.parse_args()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as name:
        config = {**LLAMA_3_8B, "num_hidden_layers": arguments.layers}
        (Path(name) / "config.json").write_text(json.dumps(config))
        from blinkc.frontend.hf import decoder_graph_from_hf
        from blinkc.surgery import segment_decoder

        graph = decoder_graph_from_hf(
            name, dtype=arguments.dtype, max_seqlen=None, random_weights_seed=0
        )
        exported, exported_cpu = time.perf_counter(), time.process_time()
        model = segment_decoder(graph)
    end, end_cpu = time.perf_counter(), time.process_time()
    report = {
        "export_s": round(exported - begin, 1),
        "export_cpu_s": round(exported_cpu - begin_cpu, 1),
        "surgery_s": round(end - exported, 1),
        "surgery_cpu_s": round(end_cpu - exported_cpu, 1),
        "peak_rss_mb": peak_rss_mb(),
        "num_segments": sum(hasattr(call, "segment") for call in model.calls),
        "num_distinct_segments": len(model.segments),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
