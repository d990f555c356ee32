"""Models in Ray's object store: an actor that nobody's end ends has the pieces of each, and replicas fetch them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from weightd.protocol.errors import NotFound, Unavailable
from weightd.ray.arguments import PUBLISHED
from weightd.ray.cache import Cache, File, Taken
from weightd.shared.modelfile import Model, ModelFile, digest

# Replicas find them there, whatever application they are of.
_NAMESPACE = "weightd"

# What is in memory at once, of publisher, actor and replica each; the store has room for it between other objects.
_PIECE_BYTES = 8 * 1024 * 1024

# For one piece: from another node, or from the disk where the store has put it.
_PIECE_S = 120.0

Piece = Any

Content = tuple[Sequence[File], Sequence[Sequence[ray.ObjectRef[Piece]]]]


class Shelf:
    """Has the pieces of one model, and is their owner: they live as long as this."""

    def __init__(self) -> None:
        self._files: list[File] = []
        self._pieces: list[list[ray.ObjectRef[Piece]]] = []
        self._is_whole = False

    def begin(self, name: str, nbytes: int) -> None:
        """The pieces of another file follow."""
        self._files.append(File(name, nbytes))
        self._pieces.append([])

    def add(self, piece: Piece) -> None:
        """Have a piece more of the file that was begun last."""
        self._pieces[-1].append(ray.put(piece))

    def end(self) -> None:
        """That is all of it."""
        self._is_whole = True

    def content(self) -> Content | None:
        """Return the files, and the pieces of each; None as long as that is not all."""
        return (self._files, self._pieces) if self._is_whole else None


def publish(path: str | os.PathLike[str]) -> str:
    """Put the files of a model into the object store; return its name there, "sha256:…".

    Raises:
        ModelFileError: they cannot be read, or are others by now.
        Unavailable: somebody else publishes this model, or has begun to; or there is no room for it.
    """
    _connect()
    with Model(Path(path)) as model:
        # Of what is open: at the end it must still be what is at the path.
        sha256 = digest(Path(path))
        options = {"name": sha256, "namespace": _NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        try:
            shelf = ray.remote(Shelf).options(**options).remote()
        except ValueError:
            # That is what Ray says where there is an actor of this name.
            _content(sha256)
            return PUBLISHED + sha256
        try:
            for file in model.files:
                _put(shelf, model, file)
            model.check_unchanged()
            ray.get(shelf.end.remote())
        except BaseException as error:
            ray.kill(shelf)
            if isinstance(error, RayError):
                raise _lost(sha256, error) from None
            raise
    return PUBLISHED + sha256


def unpublish(model: str) -> None:
    """Take a model out of the object store.

    Raises:
        NotFound: it is not there.
    """
    _connect()
    ray.kill(_shelf(model.removeprefix(PUBLISHED)))


async def take(sha256: str, base: Path) -> Taken:
    """Return a published model as files of this host, in a thread of its own.

    Raises:
        RequestError: it cannot be had.
    """
    return await asyncio.to_thread(Cache(base).take, sha256, _Store(sha256))


class _Store:
    """A model as it is in the object store; it is asked for nothing that the host has already."""

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256
        self._pieces: Sequence[Sequence[ray.ObjectRef[Piece]]] = ()

    def files(self) -> Sequence[File]:
        files, self._pieces = _content(self._sha256)
        return files

    def pieces(self, index: int) -> Iterator[Piece]:
        for each in self._pieces[index]:
            try:
                yield ray.get(each, timeout=_PIECE_S)
            except RayError as error:
                raise _lost(self._sha256, error) from None


def _put(shelf: Any, model: Model, file: ModelFile) -> None:
    """Put a file there piece by piece: the next is read when one has come."""
    ray.get(shelf.begin.remote(file.name, file.nbytes))
    with model.open(file) as content:
        while piece := content.read(_PIECE_BYTES):
            # An array, for that is not copied again where it arrives.
            ray.get(shelf.add.remote(np.frombuffer(piece, np.uint8)))


def _content(sha256: str) -> Content:
    try:
        content: Content | None = ray.get(_shelf(sha256).content.remote(), timeout=_PIECE_S)
    except RayError as error:
        raise _lost(sha256, error) from None
    if content is None:
        raise Unavailable(f"{PUBLISHED}{sha256} is being published; unpublish it if who did so has ended")
    return content


def _shelf(sha256: str) -> Any:
    try:
        return ray.get_actor(sha256, _NAMESPACE)
    except ValueError:
        raise NotFound(f"no model {PUBLISHED}{sha256} is published in this cluster") from None


def _lost(sha256: str, error: RayError) -> Unavailable:
    return Unavailable(f"{PUBLISHED}{sha256} cannot be had from the object store, or put there: {type(error).__name__}")


def _connect() -> None:
    """Be of the cluster that this host is of, where the program is of none yet."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False)
