"""What owns a resource: `close()`, and `with` around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Owner = TypeVar("_Owner", bound="Closing")


class Closing(ABC):
    """Leaving the `with` block closes, whatever ended it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give the resource back."""

    def __enter__(self: _Owner) -> _Owner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
