"""Fixtures of the front end's tests: see fake_server.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .fake_server import Server, make_servers


@pytest.fixture(scope="module")
def make_server() -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server; everything ends with the test module."""
    with ExitStack() as stack:
        yield make_servers(stack)


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()
