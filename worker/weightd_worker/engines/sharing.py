"""How processes come to one copy of the weights of a model that each of them has built.

Sharing has two places, because libraries differ. One that shares weights by itself has to know while it builds. For one
that does not, weightd shares memory as it is after a first predict, in which some pack their weights::

    holder    build(model, pids=...)      predict    export(store)      settle(handle) when nobody attaches
    worker    build(model, handle=...)    predict    attach(handle)
"""

from __future__ import annotations

import abc
import os
from typing import NamedTuple, Sequence

from weightd_protocol.messages.worker import SharingTraits


class SharedWeights(NamedTuple):
    """What a build shares: the `handle` to attach to, the bytes shared, and why it is less than hoped.

    `has_sharing_failed`: something in the way keeps apart what could be shared.
    """

    handle: str
    shared_bytes: int
    note: str
    has_sharing_failed: bool = False


class WeightSharing(abc.ABC):
    """Shares what one engine has built.

    After an error from `export` or `attach` only a new build makes the engine usable.
    """

    traits: SharingTraits

    @abc.abstractmethod
    def current_pid(self) -> str:
        """Return the engine's number for this process. Allowed before the build."""

    @abc.abstractmethod
    def export(self, store: str) -> SharedWeights:
        """Share the weights of the built model with the processes it was built for.

        Args:
            store: path of a file that the engine may create for it, in a private directory.
        """

    @abc.abstractmethod
    def allow(self, pids: Sequence[str]) -> None:
        """Let further processes attach to what was exported.

        Raises:
            AttachRefused: the library offers no way.
        """

    @abc.abstractmethod
    def attach(self, handle: str) -> SharedWeights:
        """Use the weights behind the handle that the model was built with, if that can be done."""

    @abc.abstractmethod
    def trim_store(self, handle: str) -> None:
        """Give back what was only needed while processes attached; a failure is only logged."""


class NotShared(WeightSharing):
    """Each process has weights of its own."""

    traits = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def current_pid(self) -> str:
        """Return this process's pid."""
        return str(os.getpid())

    def export(self, store: str) -> SharedWeights:
        """Share nothing."""
        return SHARING_IS_OFF

    def allow(self, pids: Sequence[str]) -> None:
        """Do nothing: there is nothing to let in to."""

    def attach(self, handle: str) -> SharedWeights:
        """Attach to nothing."""
        return SHARING_IS_OFF

    def trim_store(self, handle: str) -> None:
        """Do nothing."""


SHARING_IS_OFF = SharedWeights("", 0, "sharing is off")
