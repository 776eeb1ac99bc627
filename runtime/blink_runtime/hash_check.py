"""Compares a bundle's bytes with its manifest while the target loads: code first, weights beside.

A GPU's loader reads weights straight from their files, faster than one core can hash them. So what
runs (code, plan, tokenizer) is compared before anything is loaded, and the weights on a thread of
their own, whose verdict is awaited before the first client is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from blinkc.bundle.reader import Bundle


class HashCheck:
    """Starts comparing at once; `wait()` gives the verdict.

    Raises:
        BlinkError: a file that is not weights differs from the manifest.
    """

    def __init__(self, bundle: Bundle, weights_from: Sequence[Path] = ()) -> None:
        self._bundle = bundle
        self._weights_from = weights_from
        self._error: BaseException | None = None
        weights = bundle.weight_files
        bundle.check_hashes({entry.path for entry in bundle.manifest.files} - weights)
        self._thread = threading.Thread(
            target=self._compare, args=(weights,), name="blink-hash", daemon=True
        )
        self._thread.start()

    def _compare(self, weights: frozenset[str]) -> None:
        try:
            self._bundle.check_hashes(weights)
            self._bundle.weight_spans(search=self._weights_from, check_content=True)
        except BaseException as error:  # raised by wait()
            self._error = error

    def wait(self) -> None:
        """Wait until the weights have been compared.

        Raises:
            BlinkError: a weight file is damaged, missing, or not the one of the bundle.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
