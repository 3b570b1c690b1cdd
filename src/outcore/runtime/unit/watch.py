"""What a user may have done to parameters that are present. See [Note: edits]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from outcore.runtime.unit.absent import watched_class


class Watch:
    """Version counters of the parameters of a unit, and which of them were asked for their ``data``."""

    def __init__(self, params: Sequence[Parameter], *, is_resident: bool, has_master: bool) -> None:
        """Args: is_resident: A user may edit the home itself. has_master: Its master must follow then."""
        self._params, self._is_resident = params, is_resident
        self.versions: list[int] = []
        self.touched: set[int] = set()
        self._kind = None if is_resident and not has_master else watched_class(self.touched)

    def begin(self) -> None:
        """The parameters have become present, and are plain ones."""
        if self._kind is not None:
            for i, param in enumerate(self._params):
                param.__class__ = self._kind
                param.place = i  # type: ignore[attr-defined]
        self.note_versions()

    def note_versions(self) -> None:
        """Edits of the home up to here are known."""
        if self._is_resident:
            self.touched.clear()
            self.versions = [p._version for p in self._params]

    def edited(self) -> list[int]:
        """Parameters of a resident unit that were changed in place since ``note_versions``."""
        return [i for i, version in enumerate(self.versions) if self._params[i]._version != version]

    def note_change(self, index: int) -> None:
        """A parameter's bytes were changed under it: autograd is told, and it is no edit of the user's."""
        torch.autograd.graph.increment_version(self._params[index])
        if self.versions:
            self.versions[index] = self._params[index]._version
