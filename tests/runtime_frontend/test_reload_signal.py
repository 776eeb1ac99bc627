"""SIGHUP of a serving process: keys, certificate and log are read again, and it is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from blink_runtime.serve import reload_on_signal

from .fake_server import Server


def test_hang_up_reloads(
    make_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice first-key\n", encoding="utf-8")
    server = make_server(api_key_file=str(keys))

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.get("/v1/models", headers=headers).status_code

    previous = signal.getsignal(signal.SIGHUP)
    try:
        reload_on_signal(server.front_end)
        keys.write_text("alice second-key\n", encoding="utf-8")
        os.kill(os.getpid(), signal.SIGHUP)
        assert (status("first-key"), status("second-key")) == (401, 200)
        assert "read again" in capsys.readouterr().out
        keys.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        said = capsys.readouterr().out
        assert "the old ones stay" in said and str(keys) in said
        assert status("second-key") == 200
    finally:
        signal.signal(signal.SIGHUP, previous)
