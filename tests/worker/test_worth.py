from __future__ import annotations

import pytest

from weightd.worker.worth import COSTS, is_worth


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
    assert is_worth(mib << 20, users, COSTS[origin]) is worth
