"""How a model stands."""

from __future__ import annotations

from weightd_daemon.generations.states import advance
from weightd_daemon.models.readiness import MODEL_PHASE_TRANSITIONS, ModelPhase, ModelPhaseEvent


def test_what_is_closed_stays_so_though_another_one_takes_its_place() -> None:
    # As in a stop while a changed model loads.
    assert advance(MODEL_PHASE_TRANSITIONS, ModelPhase.CLOSED, ModelPhaseEvent.REPLACE) is ModelPhase.CLOSED
