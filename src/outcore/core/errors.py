"""The family of errors that outcore raises for faults of a user, a machine or a plan.

Every message says, in this order: what was expected, what was found, where, and what to do. Broken invariants of
outcore itself raise ``AssertionError``, which is not part of the family.
"""

from __future__ import annotations

from collections.abc import Mapping


class OutcoreError(Exception):
    """Base class: outcore refuses a request, or something underneath outcore failed."""


class ConfigError(OutcoreError, ValueError):
    """An argument, option or plan that cannot be used as given."""


class UnsupportedError(OutcoreError, RuntimeError):
    """A use that works in plain PyTorch but cannot work on streamed weights. It is refused, never silently wrong."""


class AbsentParameterError(UnsupportedError):
    """A parameter was read while its bytes are not on the device."""


class MemoryBudgetError(OutcoreError, RuntimeError):
    """A tier could not deliver the memory that the plan counts on."""


class PlanInfeasibleError(MemoryBudgetError):
    """No placement fits the budget.

    Attributes:
        required_bytes: Tier name -> the least sufficient bytes, given the allowed tiers; a budget of exactly these
            bytes is accepted.
        raise_one_to: Tier name -> the bytes of this tier that would suffice if the other tiers stay as given. A tier
            that cannot help alone is missing.
    """

    def __init__(
        self, message: str, required_bytes: Mapping[str, int], raise_one_to: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.required_bytes = dict(required_bytes)
        self.raise_one_to = dict(raise_one_to or {})


class DiskError(OutcoreError, OSError):
    """The disk tier failed: an unusable folder, a full disk, a short read, an I/O error."""


class RaceError(OutcoreError, RuntimeError):
    """The race checker found two conflicting accesses that no wait orders (only in checked runs)."""


class LaneError(OutcoreError, RuntimeError):
    """An operation on a lane failed; the original error is the cause."""
