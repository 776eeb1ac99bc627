"""Compares a golden completion with transformers' own: tokens -> who agreed, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blinkc.bundle.source_weights import num_bytes
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.surgery.segments import SegmentedModel

MAX_BYTES = 6 << 30  # larger models would need as much memory again, and minutes
# Two sums of the same products in another order: logits this close are a tie in fp32.
TIE_MARGIN = 1e-3


def checkpoint_folder(segmented: SegmentedModel) -> Path | None:
    """Return the folder of the checkpoint the weights come from, if transformers can load it."""
    paths = {
        part.path.parent
        for weight in segmented.weights.values()
        for part in weight.parts
        if part.source == "safetensors" and part.path is not None
    }
    total = sum(num_bytes(weight) for weight in segmented.weights.values())
    is_random = any(p.source == "random" for w in segmented.weights.values() for p in w.parts)
    if len(paths) != 1 or is_random or total > MAX_BYTES:
        return None
    folder = paths.pop()
    return folder if (folder / "config.json").is_file() else None


def cross_check(
    folder: Path, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> str:
    """Run the prompt through transformers in fp32 and compare, token by token.

    The answer is fed as given (teacher forcing), so that one tie does not hide what follows.

    Returns:
        What agreed, such as "transformers 5.24.0"; empty when transformers is not installed.

    Raises:
        BlinkError: at some position transformers prefers another token by more than a tie.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return ""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.tensor([[*prompt_token_ids, *output_token_ids]])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0].float()
    for number, token in enumerate(output_token_ids):
        row = logits[len(prompt_token_ids) + number - 1]
        best = int(row.argmax())
        if float(row[best] - row[token]) > TIE_MARGIN:
            raise BlinkError(
                f"the compiled model says token {token} at output position {number}, transformers "
                f"says {best} ({float(row[best]):.4f} against {float(row[token]):.4f})",
                hint="this is a bug of blinkc: report it with the model's config.json",
            )
    return f"transformers {transformers.__version__}"
