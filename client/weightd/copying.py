"""What belongs to one connection of one process, and is therefore neither copied nor pickled."""

from __future__ import annotations

from typing import Any, NoReturn

from weightd_protocol.errors import WeightdError


class NotCopyable(WeightdError, TypeError):
    """A client, a model of a client or a request under way was to be copied or pickled."""


class Uncopied:
    """Base of classes whose instances refuse `copy.copy`, `copy.deepcopy` and `pickle`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: `copy` and `pickle` both call this.

        Raises:
            NotCopyable: always.
        """
        raise NotCopyable(
            f"{type(self).__name__} objects cannot be copied or pickled: each belongs to a connection of its process. "
            "Threads share a client; another process creates its own, with the address"
        )
