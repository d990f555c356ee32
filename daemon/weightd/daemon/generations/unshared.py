"""Why a generation's weights are not shared, each cause once, however many workers meet it."""

from __future__ import annotations

from weightd.protocol.messages.children import Attached, Built


class Unshared:
    """Of one generation; what each method returns is to be told, "" is not."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def built(self, built: Built) -> str:
        """The holder may have nothing for anybody to attach to."""
        return "" if built.handle else self._once(built.note)

    def attached(self, built: Built, attached: Attached) -> str:
        """A worker may not have got what the holder has; that there is nothing, the holder has told."""
        return self._once(attached.note) if built.shared_bytes and not attached.shared_bytes else ""

    def _once(self, note: str) -> str:
        note = note or "weights are not shared"
        if note in self._told:
            return ""
        self._told.add(note)
        return note
