"""Early updates with all the time that they need."""

from __future__ import annotations

import pytest

from outcore.engine.updates.streamed import EarlyUpdates, _EarlyAttempt


@pytest.fixture
def patient_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``step()`` wait for every early update, so that none is overtaken or given up."""

    def settle(self: EarlyUpdates) -> None:
        for attempt in self._attempts.values():
            updated = attempt.gradients.unit.ledger.next_weights.ready
            assert updated is not None
            updated.wait_issued()  # the race checker takes this for no order

    monkeypatch.setattr(EarlyUpdates, "settle", settle)
    monkeypatch.setattr(_EarlyAttempt, "is_due", lambda self: self._is_made is not False)
    monkeypatch.setattr(_EarlyAttempt, "settle", lambda self: True)
