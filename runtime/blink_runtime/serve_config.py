"""What the user of a server chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blinkc.errors import BlinkError

DEFAULT_SCHEDULER = "chained"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What the user of `blink-runtime run` chooses."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    api_key_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    cors_origins: Sequence[str] = ()
    access_log: str = ""  # file, or - for standard output; empty: none
    max_connections: int = 1024
    max_connections_per_address: int = 0  # 0: no such limit
    request_timeout_s: float = 3600.0
    num_threads: int = 0  # of the CPU target; 0: as many as this process may use
    checks_golden: bool = True
    drain_s: float = 10.0  # patience with running requests after SIGTERM
    weights_from: Sequence[Path] = field(default=())
    scheduler: str = DEFAULT_SCHEDULER  # placement on a GPU
    silence_s: float = 2.0  # without a heartbeat: unhealthy, unless four steps take longer

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise BlinkError("--tls-cert and --tls-key need each other", hint="give both or none")
