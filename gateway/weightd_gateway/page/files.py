"""The static files of the status page and their HTTP headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

# Content security policy: the page loads scripts, styles and data only from this server, cannot be embedded in another
# page, and cannot send data to other servers.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all responses that belong to the page, including status.json."""

STATUS_HEADERS: Mapping[str, str] = {**HEADERS, "Cache-Control": "no-store"}
"""Headers of status.json."""


@dataclass(frozen=True)
class PageFile:
    """A static file of the page.

    Attributes:
        body: the content of the file.
        content_type: the media type, with the character set.
        etag: the entity tag with which a browser revalidates its copy.
        headers: the response headers except the content type.
    """

    body: bytes
    content_type: str
    etag: str
    headers: Mapping[str, str]


def _load_file(name: str, media_type: str) -> PageFile:
    body = resources.files("weightd_gateway.page").joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    # The browser asks for each file whether its copy is current, and mostly gets a 304 response. So an upgrade takes
    # effect immediately.
    return PageFile(body, f"{media_type}; charset=utf-8", etag, {**HEADERS, "Cache-Control": "no-cache", "ETag": etag})


FILES: Mapping[str, PageFile] = {
    "/": _load_file("index.html", "text/html"),
    "/app.js": _load_file("app.js", "text/javascript"),
    "/style.css": _load_file("style.css", "text/css"),
}
"""The files of the page by the path of the request."""
