"""What transformers said of the golden prompt, kept in BUILD: checkpoint and question -> answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blinkc.artifacts import WeightFiles
from blinkc.build_folder import BuildFolder, digest_of, hash_file
from blinkc.bundle import cross_check as asking
from blinkc.model_source import find_model
from blinkc.provenance import tool_versions

_NAME = "reference.json"


class KeptReference:
    """transformers' answers about a checkpoint; the last one stands in the build's reference.json.

    An answer follows from the checkpoint's content, the question, and the versions of transformers,
    torch and of what asks. Where transformers is missing nothing is kept, nor where the build may
    not be written.
    """

    def __init__(self, build: BuildFolder, files: WeightFiles) -> None:
        self._build = build
        self._files = files

    def cross_check(
        self, folder: Path, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> str:
        """Return what `cross_check` returns, without asking again."""
        inputs = self._inputs(folder, list(prompt_token_ids), list(output_token_ids))
        kept = self._read(inputs)
        if "agreed" in kept:
            return str(kept["agreed"])
        agreed = asking.cross_check(folder, prompt_token_ids, output_token_ids)
        if agreed:
            self._keep(inputs, {"agreed": agreed})
        return agreed

    def completion(
        self, folder: Path, prompt_token_ids: Sequence[int], num_tokens: int
    ) -> tuple[list[int], list[float], str]:
        """Return what `reference_completion` returns, without asking again."""
        inputs = self._inputs(folder, list(prompt_token_ids), num_tokens)
        kept = self._read(inputs)
        if "tokens" in kept:
            return kept["tokens"], kept["margins"], kept["made_by"]
        tokens, margins, made_by = asking.reference_completion(folder, prompt_token_ids, num_tokens)
        if tokens:
            self._keep(inputs, {"tokens": tokens, "margins": margins, "made_by": made_by})
        return tokens, margins, made_by

    def _inputs(self, folder: Path, *question: object) -> str:
        source = find_model(str(folder))
        weights = [self._files.add(path) for path in source.weight_files()]
        tools = tool_versions(("torch", "transformers"))
        return digest_of(source.digest, weights, tools, hash_file(Path(asking.__file__)), *question)

    def _read(self, inputs: str) -> dict[str, Any]:
        kept = self._build.read_json(_NAME)
        return kept if kept.get("inputs") == inputs else {}

    def _keep(self, inputs: str, answer: dict[str, Any]) -> None:
        if self._build.is_writable:
            self._build.write_json(_NAME, {"inputs": inputs, **answer})
