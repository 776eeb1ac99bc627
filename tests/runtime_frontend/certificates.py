"""Make certificates for tests with the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A certificate for 127.0.0.1 and its key, as PEM files; self-signed if there is no issuer."""

    certificate: Path
    key: Path


def make_certificate(
    folder: Path, name: str, *, algorithm: str = "ec", issuer: Certificate | None = None
) -> Certificate:
    """Write NAME.crt and NAME.key into `folder`; skip where there is no openssl program."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("the openssl program is not here")
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    signed = ["-CA", str(issuer.certificate), "-CAkey", str(issuer.key)] if issuer else []
    curve = ["-pkeyopt", "ec_paramgen_curve:P-256"] if algorithm == "ec" else []
    subprocess.run(
        [
            program, "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-newkey", algorithm, *curve, *signed,
            "-keyout", str(made.key), "-out", str(made.certificate),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return made
