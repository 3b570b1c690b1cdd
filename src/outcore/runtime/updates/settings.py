"""Settings of an optimizer's param groups, as they are when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outcore.core.errors import UnsupportedError
from outcore.optim.rules import Hyper, UpdateRule


class Settings:
    """What the rule makes of param groups."""

    def __init__(self, rule: UpdateRule | None, state_names: Sequence[str]) -> None:
        """Args: rule: None without an optimizer. state_names: For which there is memory."""
        self._rule, self._state_names = rule, state_names
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The user's own list."""

    def now(self) -> dict[int, Hyper]:
        """For updates that do not wait for ``step``."""
        return self.of(self.groups)

    def of(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyper]:
        """Settings by the id of the parameter.

        Raises:
            UnsupportedError: There is no optimizer, or a group needs states for which no memory was taken.
        """
        if self._rule is None:
            raise UnsupportedError(
                "expected an optimizer given to outcore.prepare(), but there was none (optimizer=None); nothing to step"
            )
        hypers = [self._rule.hyper(group) for group in groups]
        for hyper in hypers:
            self._refuse_new_states(hyper)
        return {id(p): hyper for group, hyper in zip(groups, hypers, strict=True) for p in group["params"]}

    def _refuse_new_states(self, hyper: Hyper) -> None:
        missing = [name for name in hyper.state_names if name not in self._state_names]
        if missing:
            raise UnsupportedError(
                f"expected param groups that need no other states than at outcore.prepare(), but one needs "
                f"{', '.join(missing)} now, for which no memory was taken; set momentum or amsgrad before prepare "
                "(momentum may be set to 0 afterwards and switched on again later)"
            )
