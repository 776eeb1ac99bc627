"""Golden files of generated text: compared, or rewritten with `--update-golden`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden instead of comparing with it; read the diff before you commit",
    )


@pytest.fixture
def compare_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function (path below tests/golden, text) that fails on any difference."""
    # The option exists only where this folder was named on the command line.
    updates = request.config.getoption("--update-golden", default=False)

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if updates:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: pytest tests/codegen --update-golden"
        assert text == path.read_text(), f"{path} differs: see --update-golden"

    return compare
