"""Compares a golden completion with transformers' own: tokens -> who agreed, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.bundle.source_weights import num_bytes
from blinkc.errors import BlinkError
from blinkc.usable_cores import usable_cores

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
    model = _load(folder)
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


def reference_completion(
    folder: Path, prompt_token_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], list[float], str]:
    """Complete the prompt greedily with transformers in fp32.

    Returns:
        Tokens; for each, how far the second choice lies behind, in standard deviations of the
        logits; and who made them. All empty when transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return [], [], ""
    model = _load(folder)
    ids, margins = list(prompt_token_ids), []
    for _ in range(num_tokens):
        with torch.inference_mode():
            row = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        best, second = (float(value) for value in row.topk(2).values)
        margins.append((best - second) / float(row.std()))
        ids.append(int(row.argmax()))
    made_by = f"transformers {transformers.__version__}, fp32"
    return ids[len(prompt_token_ids) :], margins, made_by


def _load(folder: Path) -> Any:
    import torch
    import transformers

    # torch follows the affinity mask, and no container's quota.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
    except Exception as error:  # any model's own code
        raise BlinkError(
            f"transformers cannot load {folder}: {type(error).__name__}: {error}",
            hint="mend the checkpoint, or do without the comparison: --no-cross-check",
        ) from error
