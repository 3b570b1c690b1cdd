"""Base class of objects that a ``with`` block closes at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Owns something until ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the object owns. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
