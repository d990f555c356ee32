"""What is used of a request, whoever has read it: aiohttp, or a server that speaks ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from multidict import CIMultiDictProxy

from weightd_gateway.http.connection import ConnectionPhase


class HttpContent(Protocol):
    """The body, as it comes."""

    async def readexactly(self, n: int) -> bytes:
        """Return so many bytes.

        Raises:
            IncompleteReadError: it has fewer.
        """
        ...

    async def readchunk(self) -> tuple[bytes, bool]:
        """Return what has come, or b"" at the end; and something that nobody looks at."""
        ...

    def iter_any(self) -> AsyncIterator[bytes]:
        """Return what has come, again and again."""
        ...


class RequestConnection(Protocol):
    """What is known of the connection that a request came by, and what it is told.

    Attributes:
        uid: the number of the user at the other end; None where nobody knows.
        common_name: that of the certificate of the other end; None where there is none.
    """

    uid: int | None
    common_name: str | None

    def set_phase(self, phase: ConnectionPhase) -> None:
        """Something else is waited for from now on."""
        ...

    def begin_body(self, body: HttpContent) -> None:
        """The body is read."""
        ...


class HttpRequest(Protocol):
    """A request; its `protocol` is a `RequestConnection`, though aiohttp does not know that."""

    @property
    def method(self) -> str:
        """GET, or another."""
        ...

    @property
    def raw_path(self) -> str:
        """The path as it was sent, with its query."""
        ...

    @property
    def path(self) -> str:
        """The path alone, decoded."""
        ...

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """All of them."""
        ...

    @property
    def content_length(self) -> int | None:
        """How many bytes its body has; None where that was not said."""
        ...

    @property
    def content(self) -> HttpContent:
        """Its body, of which nothing has been read."""
        ...

    @property
    def transport(self) -> asyncio.Transport | None:
        """Where a word before the answer can be written; None: nowhere."""
        ...

    @property
    def protocol(self) -> object:
        """The `RequestConnection`."""
        ...
