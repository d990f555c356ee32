"""The one error of page sharing."""

from __future__ import annotations


class PageSharingUnavailable(Exception):
    """Pages cannot be shared here and now; ``str(error)`` is the reason, fit to be shown to an operator.

    Whenever it is raised the memory of the process is as it was, byte for byte: the caller goes on with
    private memory.
    """
