"""Tests of the phases of a model."""

from __future__ import annotations

from weightd_daemon.generations.states import advance
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS, ModelPhase, ModelPhaseEvent


def test_closed_model_stays_closed_after_replacement() -> None:
    # This happens if the daemon stops while a changed model loads.
    assert advance(MODEL_PHASE_TRANSITIONS, ModelPhase.CLOSED, ModelPhaseEvent.REPLACE) is ModelPhase.CLOSED
