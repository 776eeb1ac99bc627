"""Digits to Unicode alone, and numbers that are too long, are refused in words."""

import pytest

from blink_runtime.serve_roles import host_and_port
from blink_runtime.tokenize import _ids_from_text
from blinkc.errors import BlinkError

NO_NUMBERS = ("²", "٣", "9" * 5000, "-1")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_port_that_is_no_number_is_refused(text):
    with pytest.raises(BlinkError, match="is no HOST:PORT"):
        host_and_port(f"127.0.0.1:{text}")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_token_id_that_is_no_number_is_refused(text):
    with pytest.raises(BlinkError, match="is no token id"):
        _ids_from_text(text, 100)


def test_numbers_are_taken():
    assert host_and_port("127.0.0.1:65535") == ("127.0.0.1", 65535)
    assert _ids_from_text("[1, 99]", 100) == [1, 99]
