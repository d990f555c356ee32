"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A piece of the product in place of another, and the tests that have to notice.

    Attributes:
        room: to which the piece belongs.
        piece: a text that occurs once in the product, whichever file it is in.
        instead: what takes its place.
        tests: arguments of pytest; files and directories as seen from tests/.
        equivalent: why nobody can notice, where that is so.
        on_37: they run on the real MindSpore Lite, in .venv-mslite.
    """

    room: str
    piece: str
    instead: str
    tests: str
    equivalent: str = ""
    on_37: bool = False


def mutants(room: str, tests: str, *pairs: tuple[str, str], on_37: bool = False) -> list[Mutant]:
    """Return mutants that the same tests have to notice, each a piece and what takes its place."""
    return [Mutant(room, piece, instead, tests, on_37=on_37) for piece, instead in pairs]
