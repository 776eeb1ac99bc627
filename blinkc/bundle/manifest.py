"""The manifest of a bundle: manifest.json -> `Manifest`, checked; needs only pydantic.

The manifest names every file of the bundle with its size and SHA-256, and holds its own. What is
not named is not read.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from blinkc.errors import BlinkError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_FILES = 4096
MAX_WEIGHTS = 1 << 18
MAX_PARTS = 1 << 19
MAX_FILE_BYTES = 1 << 44
MAX_TOKENS = 1 << 24
MAX_VOCABULARY = 1 << 24

DTYPE_BYTES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "fp8": 1,
}

_PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


def checked_path(path: str) -> str:
    """Return `path` if it is relative, normal and stays inside its folder.

    Raises:
        ValueError: it is absolute, has empty, hidden, `.` or `..` parts, or odd characters.
    """
    parts = path.split("/")
    if len(path) > 512 or not all(_PATH_PART.fullmatch(part) for part in parts):
        raise ValueError(f"{path[:80]!r} is no plain path inside the bundle")
    return str(PurePosixPath(path))


BundlePath = Annotated[str, AfterValidator(checked_path)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(max_length=4096)]
Bytes = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Positive = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)]
Axis = Annotated[int, Field(ge=0, le=1 << 40)]
Shape = Annotated[tuple[Axis, ...], Field(max_length=8)]
Dtype = Literal["fp32", "fp16", "bf16", "int32", "int64", "uint8", "int8", "bool", "fp8"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class FileEntry(_Strict):
    """A file of the bundle."""

    path: BundlePath
    bytes: Bytes
    sha256: Sha256


class ExternalFile(_Strict):
    """A weight file outside the bundle (`--weights reference`), known by its content."""

    path: Text
    bytes: Bytes
    sha256: Sha256


class WeightPart(_Strict):
    """Bytes of a file that make up (part of) a weight.

    `shape` and `dtype` are as in the file. On reading, a 2-D part is transposed if `transpose`,
    then cut to the range `rows` of its first axis, converted to the weight's dtype, and appended
    along axis 0.
    """

    file: Name  # a path of `files`, or "external:<index>"
    offset: Bytes
    bytes: Bytes
    shape: Shape
    dtype: Dtype
    transpose: bool = False
    rows: tuple[Axis, Axis] | None = None


class WeightEntry(_Strict):
    """A weight in the order in which the target takes them.

    It lies in files (`parts`), or the target draws it when it loads (`seed`, GPU targets alone).
    """

    name: Name
    shape: Shape
    dtype: Dtype
    parts: Annotated[tuple[WeightPart, ...], Field(max_length=4096)] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None

    @property
    def is_drawn(self) -> bool:
        """Say whether no file holds it."""
        return self.seed is not None

    @property
    def num_bytes(self) -> int:
        """Return the size in memory."""
        count = 1
        for axis in self.shape:
            count *= axis
        return count * DTYPE_BYTES[self.dtype]


class EngineEntry(_Strict):
    """A segment's plan, how it was built, and which graph keys run it."""

    segment: Name
    engine: Literal["tensorrt", "tensorrt-rtx"]
    version: Text  # of the TensorRT that built it
    plan: BundlePath
    model: BundlePath  # what `blinkc rebuild` builds it from
    level: Annotated[int, Field(ge=0, le=9)]
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    scratch_bytes: Bytes  # 0: not known before it is loaded
    max_tokens: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=16)]  # of profiles
    choice: dict[str, Count] = Field(max_length=32)  # what runs, for how many graph keys
    timings_us: dict[str, dict[str, float]] = Field(default_factory=dict, max_length=256)


class Target(_Strict):
    """What the bundle runs on."""

    name: Annotated[str, Field(pattern=r"^(cpu|sm_[0-9]{2,3}[a-z]?(,sm_[0-9]{2,3}[a-z]?){0,7})$")]
    machine: Literal["x86_64", "aarch64"]  # of the host code
    march: Annotated[str, Field(max_length=64)] = ""  # instructions the host code needs
    architecture: Annotated[str, Field(max_length=80)] = ""  # of the device code, e.g. sm_90a
    library: BundlePath | None = None  # cpu: the shared object with model and scheduler
    engine: Annotated[str, Field(max_length=64)]
    cubins: dict[str, BundlePath] = Field(default_factory=dict, max_length=64)
    builds: dict[str, Text] = Field(default_factory=dict, max_length=64)  # must match on loading
    engines: Annotated[tuple[EngineEntry, ...], Field(max_length=4096)] = ()
    requires: dict[str, Text] = Field(default_factory=dict, max_length=64)  # oldest that will do


class Limits(_Strict):
    """Sizes the scheduler was compiled for; ring sizes follow from them."""

    max_batch: Positive
    max_seqlen: Positive
    max_prefill_tokens: Positive
    max_prefill_batch: Positive
    page_size_tokens: Positive
    num_kv_pages: Positive  # usable; the sink page comes on top
    max_pages_per_lane: Positive
    num_slots: Positive
    num_front_ends: Annotated[int, Field(ge=1, le=16)]
    max_prompt_tokens: Positive
    max_output_tokens: Positive
    output_record_bytes: Annotated[int, Field(ge=8, le=64)]
    trace_capacity: Annotated[int, Field(ge=1, le=1 << 20)]
    sampler_features: Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
    vocab_size: Positive


class PlanSummary(_Strict):
    """What `inspect` shows of the capture plan; the whole of it is the file `plan`."""

    plan: BundlePath
    num_prefill_keys: Positive
    num_decode_keys: Positive
    ring_bytes: Bytes
    kv_bytes: Bytes
    weight_bytes: Bytes
    arena_bytes: Bytes
    graph_bytes: Bytes


class Tokenizer(_Strict):
    """Text to ids and back. `compiled` is our own blob; without it: the tokenizers library."""

    compiled: BundlePath | None = None
    tokenizer_json: BundlePath | None = None
    config: BundlePath | None = None  # tokenizer_config.json
    chat_template: BundlePath | None = None
    bos_token: Annotated[str, Field(max_length=256)] | None = None
    eos_token: Annotated[str, Field(max_length=256)] | None = None
    bos_token_id: TokenId | None = None
    eos_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=16)] = ()
    special_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=65536)] = ()
    tool_format: Literal["none", "hermes", "llama3"] = "none"  # how the model writes calls


class Golden(_Strict):
    """A greedy completion that the target reproduces at load and in `verify`."""

    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=1024)]
    output_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=1024)]  # empty: at first load
    # For each output token: how far the reference's second choice lies behind, in standard
    # deviations of its logits. Empty: the tokens must come out exactly.
    margins: Annotated[tuple[float, ...], Field(max_length=1024)] = ()
    made_by: Text
    checked_against: Text = ""  # e.g. "transformers 5.24.0"; empty: nothing


class Manifest(_Strict):
    """A bundle's table of contents."""

    schema_version: Literal[1]
    sha256: Sha256 | None = None  # of the rest of this manifest; older bundles have none
    abi_version: Annotated[int, Field(ge=1, le=1 << 16)]
    model_name: Name
    architecture: Name
    dtype: Dtype
    target: Target
    limits: Limits
    plan: PlanSummary
    tokenizer: Tokenizer
    golden: Golden | None = None
    notes: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    tools: dict[str, Text] = Field(max_length=128)  # versions and build numbers
    rebuild: Text  # the command that makes the bundle again
    files: Annotated[tuple[FileEntry, ...], Field(max_length=MAX_FILES)]
    external_files: Annotated[tuple[ExternalFile, ...], Field(max_length=MAX_FILES)] = ()
    weights: Annotated[tuple[WeightEntry, ...], Field(max_length=MAX_WEIGHTS)]

    def file(self, path: str) -> FileEntry:
        """Return the entry of `path`; KeyError when the bundle has no such file."""
        for entry in self.files:
            if entry.path == path:
                return entry
        raise KeyError(path)

    @model_validator(mode="after")
    def _check_references(self) -> Manifest:
        sizes = {entry.path: entry.bytes for entry in self.files}
        if len(sizes) != len(self.files):
            raise ValueError("a file is listed twice")
        if MANIFEST_NAME in sizes:
            raise ValueError(f"{MANIFEST_NAME} cannot list itself")
        named = [
            self.target.library,
            *self.target.cubins.values(),
            *(path for entry in self.target.engines for path in (entry.plan, entry.model)),
            self.plan.plan,
            self.tokenizer.compiled,
            self.tokenizer.tokenizer_json,
            self.tokenizer.config,
            self.tokenizer.chat_template,
        ]
        for path in named:
            if path is not None and path not in sizes:
                raise ValueError(f"{path} is used but not listed in files")
        for index, external in enumerate(self.external_files):
            sizes[f"external:{index}"] = external.bytes
        if len({weight.name for weight in self.weights}) != len(self.weights):
            raise ValueError("a weight is listed twice")
        if sum(len(weight.parts) for weight in self.weights) > MAX_PARTS:
            raise ValueError("too many weight parts")
        for weight in self.weights:
            _check_weight(weight, sizes)
        for token in self.golden.prompt_token_ids if self.golden else ():
            if token >= self.limits.vocab_size:
                raise ValueError(f"golden prompt: token id {token} is outside the vocabulary")
        return self


def _check_weight(weight: WeightEntry, sizes: dict[str, int]) -> None:
    """Raise ValueError unless the parts lie inside their files and add up to the weight."""
    if bool(weight.parts) == (weight.seed is not None):
        raise ValueError(f"weight {weight.name}: it has neither parts nor a seed, or both")
    if weight.seed is not None:
        return
    total_rows = 0
    for part in weight.parts:
        size = sizes.get(part.file)
        if size is None:
            raise ValueError(f"weight {weight.name}: {part.file} is not listed")
        if part.offset + part.bytes > size:
            raise ValueError(
                f"weight {weight.name}: bytes {part.offset}..{part.offset + part.bytes} are past "
                f"the end of {part.file}, {size} bytes long"
            )
        count = 1
        for axis in part.shape:
            count *= axis
        if count * DTYPE_BYTES[part.dtype] != part.bytes:
            raise ValueError(f"weight {weight.name}: {part.bytes} bytes do not make {part.shape}")
        shape = part.shape
        if part.transpose:
            if len(shape) != 2:
                raise ValueError(f"weight {weight.name}: only a matrix can be transposed")
            shape = shape[::-1]
        if part.rows is not None:
            first, last = part.rows
            if not shape or not 0 <= first <= last <= shape[0]:
                raise ValueError(f"weight {weight.name}: rows {part.rows} are outside {shape}")
            shape = (last - first, *shape[1:])
        if shape[1:] != weight.shape[1:] or len(shape) != len(weight.shape):
            raise ValueError(f"weight {weight.name}: a part {shape} does not fit {weight.shape}")
        total_rows += shape[0] if shape else 1
    if weight.shape and total_rows != weight.shape[0]:
        raise ValueError(f"weight {weight.name}: parts make {total_rows} rows of {weight.shape}")


def manifest_from_bytes(data: bytes, *, where: str) -> Manifest:
    """Read and check a manifest.

    Args:
        data: the bytes of manifest.json.
        where: how to call it in errors.

    Raises:
        BlinkError: it is too large, no JSON, of another version, or something is out of bounds.
    """
    hint = "copy the bundle again, or make it again with blinkc bundle"
    if len(data) > MAX_MANIFEST_BYTES:
        limit = MAX_MANIFEST_BYTES
        raise BlinkError(f"{where} has {len(data)} bytes; a manifest has at most {limit}")
    try:
        raw = json.loads(data)
        digest = _digest(raw) if isinstance(raw, dict) else ""
    except (ValueError, RecursionError) as error:
        raise BlinkError(f"{where} is damaged: {_short(error)}", hint=hint) from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        rebuild = raw.get("rebuild")
        raise BlinkError(
            f"{where} has schema version {version}; this is made for version {SCHEMA_VERSION}",
            hint=f"make it again: {rebuild}" if isinstance(rebuild, str) else hint,
        )
    if isinstance(raw, dict) and raw.get("sha256") not in (None, digest):
        raise BlinkError(f"{where} is damaged: it has other content than its SHA-256", hint=hint)
    try:
        # From text and not from `raw`: strict mode takes JSON arrays for tuples only there.
        return Manifest.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        raise BlinkError(f"{where} is refused: {_first_problem(error)}", hint=hint) from None


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Write a manifest with its SHA-256: sorted keys, the same bytes for the same content."""
    data: dict[str, Any] = manifest.model_dump(mode="json")
    data["sha256"] = _digest(data)
    return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _digest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's values but its own, whatever the spaces between them."""
    rest = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return _short(error)
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    place = ".".join(str(part) for part in first["loc"]) or "manifest"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{place[:120]}: {first['msg'][:300]}{more}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
