from __future__ import annotations

import pytest

from weightd_worker.process_memory import HOLDER_COST_BYTES, is_holder_worthwhile


@pytest.mark.parametrize(
    ("mib", "users", "origin", "worth"),
    [
        # What the others save is more than a holder costs, or is not.
        (8, 2, "forked", True),
        (7, 2, "forked", False),
        (1, 9, "forked", True),
        (8, 2, "spawned", False),
        (32, 2, "spawned", True),
        # One alone saves nothing of that, but the next one is there sooner.
        (63, 1, "forked", False),
        (64, 1, "forked", True),
        (0, 100, "forked", False),
        # Not asked, as on a card.
        (0, 0, "spawned", True),
    ],
)
def test_a_holder_is_worth_what_it_saves(mib: int, users: int, origin: str, worth: bool) -> None:
    assert is_holder_worthwhile(mib << 20, users, HOLDER_COST_BYTES[origin]) is worth
