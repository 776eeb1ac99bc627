"""Digits to Unicode alone, and numbers that are too long, are refused in words."""

import pytest
from click.testing import CliRunner

from blink_runtime.cli import main
from blink_runtime.serve_roles import check_front_end_index, host_and_port
from blink_runtime.tokenize import _ids_from_text
from blinkc.errors import BlinkError

NO_NUMBERS = ("²", "٣", "9" * 5000, "-1")


@pytest.mark.parametrize("text", [text for text in NO_NUMBERS if not text.startswith("9")])
def test_a_port_that_is_no_number_is_refused(text):
    with pytest.raises(BlinkError, match="is no HOST:PORT"):
        host_and_port(f"127.0.0.1:{text}")


@pytest.mark.parametrize("text", ["65536", "100000", "9" * 5000])
def test_a_port_that_is_too_large_is_refused(text):
    with pytest.raises(BlinkError, match="ports end at 65535") as raised:
        host_and_port(f"127.0.0.1:{text}", example="127.0.0.1:8000")
    assert raised.value.hint == "for example 127.0.0.1:8000"


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_token_id_that_is_no_number_is_refused(text):
    with pytest.raises(BlinkError, match="is no token id"):
        _ids_from_text(text, 100)


@pytest.mark.parametrize("index", [2, -1, 2**31])
def test_a_front_end_that_the_ring_has_no_slots_for_is_refused(index):
    """The bug: a traceback, where the message before it had advised another number."""
    with pytest.raises(BlinkError, match=f"--front-end {index}: ") as raised:
        check_front_end_index(index, 2)
    assert "--num-front-ends" in raised.value.hint
    check_front_end_index(1, 2)


def test_numbers_are_taken():
    assert host_and_port("127.0.0.1:65535") == ("127.0.0.1", 65535)
    assert _ids_from_text("[1, 99]", 100) == [1, 99]


WRONG_OPTIONS = (
    ("run", "--port", "65536"),
    ("run", "--threads", "-1"),
    ("run", "--threads", "100000"),
    ("run", "--request-timeout", "nan"),
    ("run", "--request-timeout", "inf"),
    ("run", "--drain", "-1"),
    ("run", "--max-connections", "99999999999999999999"),
    ("run", "--cors-origin", "example.com"),
    ("run", "--cors-origin", "https://Example.com/"),
    ("run", "--weights-from", "/nonexistent"),
    ("serve-dpu", "--wait", "nan"),
    ("serve-dpu", "--front-end", "5000000000"),
    ("serve-gpu", "--gid-index", "256"),
    ("top", "--interval", "-1"),
    ("top", "--interval", "nan"),
    ("trace", "--seconds", "inf"),
)


@pytest.mark.parametrize("words", WRONG_OPTIONS, ids=" ".join)
def test_an_option_that_cannot_be_is_refused_before_anything_is_read(words, tmp_path):
    """The bug: a traceback, a wait for ever, or a word about it once the model was loaded."""
    command, option, value = words
    place = () if command in ("top", "trace") else (str(tmp_path),)
    needed = {"serve-gpu": ("--listen", "/x"), "serve-dpu": ("--connect", "/x")}
    done = CliRunner().invoke(main, [command, *place, *needed.get(command, ()), option, value])
    assert done.exit_code == 2
    assert option in done.output


@pytest.mark.parametrize("origin", ["*", "null", "http://localhost:3000", "https://[::1]:8443"])
def test_origins_are_taken(origin, tmp_path):
    done = CliRunner().invoke(main, ["run", str(tmp_path), "--cors-origin", origin])
    assert "is not a bundle" in done.output
