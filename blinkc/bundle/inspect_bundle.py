"""Describes a bundle for people: `Bundle` -> text."""

from __future__ import annotations

from blinkc.bundle.manifest import Manifest, Target
from blinkc.bundle.reader import Bundle

MIB = 1 << 20


def inspect_text(bundle: Bundle) -> str:
    """Return what is in a bundle, a fact a line."""
    manifest = bundle.manifest
    limits, plan, target = manifest.limits, manifest.plan, manifest.target
    embedded = sum(f.bytes for f in manifest.files)
    device = target.architecture or f"{target.machine} {target.march}".strip()
    tokenizer = manifest.tokenizer
    kind = "compiled" if tokenizer.compiled else "tokenizers library"
    rows = [
        ("model", f"{manifest.model_name} ({manifest.architecture}, {manifest.dtype})"),
        ("target", f"{target.name} ({device}), engine {target.engine}"),
        (
            "limits",
            f"{limits.max_batch} lanes, {limits.max_seqlen} tokens a request, "
            f"{limits.max_prefill_tokens} new tokens a prefill step, {limits.num_slots} slots",
        ),
        (
            "graphs",
            f"{plan.num_prefill_keys} prefill and {plan.num_decode_keys} decode keys, "
            f"{plan.graph_bytes / MIB:.1f} MiB",
        ),
        (
            "memory",
            f"weights {plan.weight_bytes / MIB:.1f} MiB, KV cache {plan.kv_bytes / MIB:.1f} MiB "
            f"({limits.num_kv_pages} pages of {limits.page_size_tokens} tokens), ring "
            f"{plan.ring_bytes / MIB:.1f} MiB, scratch {plan.arena_bytes / MIB:.1f} MiB",
        ),
        ("weights", _weights_text(manifest)),
        ("tokenizer", kind if tokenizer.tokenizer_json else "none"),
        ("template", "yes" if tokenizer.chat_template else "none"),
        ("eos ids", ", ".join(map(str, tokenizer.eos_token_ids)) or "none"),
        ("golden", _golden_text(manifest)),
        ("files", f"{len(manifest.files)}, {embedded / MIB:.1f} MiB"),
        *_engine_rows(target),
        ("made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
        ("rebuild", manifest.rebuild),
    ]
    rows += [("note", note) for note in manifest.notes]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _weights_text(manifest: Manifest) -> str:
    external = sum(f.bytes for f in manifest.external_files)
    place = f"{external / MIB:.1f} MiB referenced" if external else "embedded"
    num_weights = len(manifest.weights)
    num_drawn = sum(weight.is_drawn for weight in manifest.weights)
    if not num_drawn:
        return f"{num_weights} tensors, {place}"
    rest = f", {num_weights - num_drawn} {place}" if num_drawn < num_weights else ""
    return f"{num_weights} tensors, {num_drawn} drawn from seeds at each load{rest}"


def _golden_text(manifest: Manifest) -> str:
    golden = manifest.golden
    if golden is None:
        return "none"
    num_prompt, num_output = len(golden.prompt_token_ids), len(golden.output_token_ids)
    if not num_output:
        on_gpu = manifest.target.name != "cpu"
        return f"{num_prompt} -> what the first load gives" if on_gpu else "none"
    checked = f", checked against {golden.checked_against}" if golden.checked_against else ""
    return f"{num_prompt} -> {num_output} tokens{checked}"


def _engine_rows(target: Target) -> list[tuple[str, str]]:
    """Say of each plan how it was built, which graphs run it, and what was measured."""
    rows = []
    for entry in target.engines:
        choice = ", ".join(f"{what} for {count} keys" for what, count in entry.choice.items())
        measured = ", ".join(
            f"{rows_}: " + " ".join(f"{what} {us:g} us" for what, us in times.items())
            for rows_, times in entry.timings_us.items()
        )
        rows.append(
            (
                "engine",
                f"{entry.segment}: {entry.engine} {entry.version}, level {entry.level}, "
                f"{entry.seconds:.1f} s, profiles to {', '.join(map(str, entry.max_tokens))} rows; "
                f"{choice}" + (f"; measured {measured}" if measured else "; not measured"),
            )
        )
    if target.builds:
        rows.append(("bound to", ", ".join(f"{k} {v}" for k, v in target.builds.items())))
    return rows
