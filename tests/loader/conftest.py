"""Fixtures of the loader's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server import DEMO_BUNDLE


@pytest.fixture(scope="module")
def demo_bundle() -> Path:
    if not (DEMO_BUNDLE / "manifest.json").exists():
        pytest.skip("make demo makes the bundle")
    return DEMO_BUNDLE
