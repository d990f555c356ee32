from __future__ import annotations

import pytest

from weightd.worker.worth import COSTS, is_worth


@pytest.mark.parametrize(
    ("mib", "users", "origin", "is_template", "worth"),
    [
        # What the others save is more than a holder costs, or is not.
        (8, 2, "forked", False, True),
        (7, 2, "forked", False, False),
        (1, 9, "forked", True, True),
        (8, 2, "spawned", False, False),
        (32, 2, "spawned", False, True),
        # One alone saves nothing; but of a template the next one is there at once.
        (4096, 1, "forked", False, False),
        (63, 1, "forked", True, False),
        (64, 1, "forked", True, True),
        (0, 100, "forked", True, False),
        # Not asked, as on a card.
        (0, 0, "spawned", False, True),
    ],
)
def test_a_holder_is_worth_what_it_saves(mib: int, users: int, origin: str, is_template: bool, worth: bool) -> None:
    assert is_worth(mib << 20, users, COSTS[origin], is_template=is_template) is worth
