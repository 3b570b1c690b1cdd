"""The closed family of errors that outcore raises for what a user, a machine or a plan did wrong.

Every message says, in this order: what was expected, what was found, where, and what to do. Broken invariants of
outcore itself are ``AssertionError`` and not part of the family.
"""

from __future__ import annotations

from collections.abc import Mapping


class OutcoreError(Exception):
    """Anything that outcore refuses or that went wrong underneath it."""


class ConfigError(OutcoreError, ValueError):
    """An argument, option or plan that cannot be used as given."""


class UnsupportedError(OutcoreError, RuntimeError):
    """Something that works in plain PyTorch and cannot work on streamed weights: refused, never silently wrong."""


class AbsentParameterError(UnsupportedError):
    """A parameter was read while its bytes are not on the device."""


class MemoryBudgetError(OutcoreError, RuntimeError):
    """A tier could not deliver the memory that the plan was promised."""


class PlanInfeasibleError(MemoryBudgetError):
    """No placement fits the budget.

    Attributes:
        required_bytes: Tier name -> the least that would do given the tiers allowed; a budget of exactly these bytes
            is accepted.
        raise_one_to: Tier name -> how much of it would do with the other tiers as given. A tier that alone cannot help
            is missing.
    """

    def __init__(
        self, message: str, required_bytes: Mapping[str, int], raise_one_to: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.required_bytes = dict(required_bytes)
        self.raise_one_to = dict(raise_one_to or {})


class DiskError(OutcoreError, OSError):
    """The disk tier failed: a folder that cannot serve, a full disk, a short read, an I/O error."""


class RaceError(OutcoreError, RuntimeError):
    """The race checker found two conflicting accesses that no wait orders (only in checked runs)."""


class LaneError(OutcoreError, RuntimeError):
    """An operation on a lane failed; the original error is the cause."""
