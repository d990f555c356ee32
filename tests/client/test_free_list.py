"""Nothing is given twice, and everything comes back."""

from __future__ import annotations

from typing import Dict

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightd.shm_arena import ALIGNMENT, FreeList

_NBYTES = 16 * ALIGNMENT


class World(RuleBasedStateMachine):
    """Bytes by their owners, one by one, beside what `Space` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeList(_NBYTES)
        self.taken: Dict[int, int] = {}

    def units(self) -> str:
        """Each unit of memory as a letter: taken or free."""
        return "".join(
            "x" if any(begin <= at < begin + size for begin, size in self.taken.items()) else "."
            for at in range(0, _NBYTES, ALIGNMENT)
        )

    @rule(nbytes=st.integers(0, _NBYTES + 1))
    def take(self, nbytes: int) -> None:
        """It is where it fits first, or nowhere."""
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        expected = self.units().find("." * (size // ALIGNMENT))
        begin = self.space.take(nbytes)
        assert begin == (None if expected < 0 else expected * ALIGNMENT)
        if begin is not None:
            self.taken[begin] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """Any of them, in any order."""
        begin = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.release(begin)
        del self.taken[begin]

    @invariant()
    def tells_whether_it_is_free(self) -> None:
        """Only then a region may go."""
        assert self.space.is_unused == (not self.taken)


TestSpace = World.TestCase
