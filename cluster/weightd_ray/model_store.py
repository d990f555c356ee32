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

from weightd_common.modelfiles.files import ModelFile, OpenModel, digest
from weightd_protocol.errors import NotFound, Unavailable
from weightd_ray.model_cache import CachedModel, ModelCache, PublishedFile
from weightd_ray.options import PUBLISHED_PREFIX

# Replicas find them there, whatever application they are of.
_NAMESPACE = "weightd"

# What is in memory at once, of publisher, actor and replica each; the store has room for it between other objects.
_CHUNK_BYTES = 8 * 1024 * 1024

# For one piece: from another node, or from the disk where the store has put it.
_CHUNK_TIMEOUT_S = 120.0

Chunk = Any

Content = tuple[Sequence[PublishedFile], Sequence[Sequence[ray.ObjectRef[Chunk]]]]


class ModelStoreActor:
    """Has the pieces of one model, and is their owner: they live as long as this."""

    def __init__(self) -> None:
        self._files: list[PublishedFile] = []
        self._chunks: list[list[ray.ObjectRef[Chunk]]] = []
        self._is_complete = False

    def begin_file(self, name: str, nbytes: int) -> None:
        """The pieces of another file follow."""
        self._files.append(PublishedFile(name, nbytes))
        self._chunks.append([])

    def add_chunk(self, chunk: Chunk) -> None:
        """Have a piece more of the file that was begun last."""
        self._chunks[-1].append(ray.put(chunk))

    def finish(self) -> None:
        """That is all of it."""
        self._is_complete = True

    def content(self) -> Content | None:
        """Return the files, and the pieces of each; None as long as that is not all."""
        return (self._files, self._chunks) if self._is_complete else None


def publish(path: str | os.PathLike[str]) -> str:
    """Put the files of a model into the object store; return its name there, "sha256:…".

    Raises:
        ModelFileError: they cannot be read, or are others by now.
        Unavailable: somebody else publishes this model, or has begun to; or there is no room for it.
    """
    _connect()
    with OpenModel(Path(path)) as model:
        # Of what is open: at the end it must still be what is at the path.
        sha256 = digest(Path(path))
        options = {"name": sha256, "namespace": _NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        try:
            store = ray.remote(ModelStoreActor).options(**options).remote()
        except ValueError:
            # That is what Ray says where there is an actor of this name.
            _get_content(sha256)
            return PUBLISHED_PREFIX + sha256
        try:
            for file in model.files:
                _put_file(store, model, file)
            model.check_unchanged()
            ray.get(store.finish.remote())
        except BaseException as error:
            ray.kill(store)
            if isinstance(error, RayError):
                raise _unavailable(sha256, error) from None
            raise
    return PUBLISHED_PREFIX + sha256


def unpublish(model: str) -> None:
    """Take a model out of the object store.

    Raises:
        NotFound: it is not there.
    """
    _connect()
    ray.kill(_get_store(model.removeprefix(PUBLISHED_PREFIX)))


async def fetch(sha256: str, base: Path) -> CachedModel:
    """Return a published model as files of this host, in a thread of its own.

    Raises:
        RequestError: it cannot be had.
    """
    return await asyncio.to_thread(ModelCache(base).take, sha256, _Store(sha256))


class _Store:
    """A model as it is in the object store; it is asked for nothing that the host has already."""

    def __init__(self, sha256: str) -> None:
        self._sha256 = sha256
        self._chunks: Sequence[Sequence[ray.ObjectRef[Chunk]]] = ()

    def files(self) -> Sequence[PublishedFile]:
        files, self._chunks = _get_content(self._sha256)
        return files

    def chunks(self, index: int) -> Iterator[Chunk]:
        for each in self._chunks[index]:
            try:
                yield ray.get(each, timeout=_CHUNK_TIMEOUT_S)
            except RayError as error:
                raise _unavailable(self._sha256, error) from None


def _put_file(store: Any, model: OpenModel, file: ModelFile) -> None:
    """Put a file there piece by piece: the next is read when one has come."""
    ray.get(store.begin_file.remote(file.name, file.nbytes))
    with model.open(file) as content:
        while chunk := content.read(_CHUNK_BYTES):
            # An array, for that is not copied again where it arrives.
            ray.get(store.add_chunk.remote(np.frombuffer(chunk, np.uint8)))


def _get_content(sha256: str) -> Content:
    try:
        content: Content | None = ray.get(_get_store(sha256).content.remote(), timeout=_CHUNK_TIMEOUT_S)
    except RayError as error:
        raise _unavailable(sha256, error) from None
    if content is None:
        raise Unavailable(f"{PUBLISHED_PREFIX}{sha256} is being published; unpublish it if who did so has ended")
    return content


def _get_store(sha256: str) -> Any:
    try:
        return ray.get_actor(sha256, _NAMESPACE)
    except ValueError:
        raise NotFound(f"no model {PUBLISHED_PREFIX}{sha256} is published in this cluster") from None


def _unavailable(sha256: str, error: RayError) -> Unavailable:
    return Unavailable(
        f"{PUBLISHED_PREFIX}{sha256} cannot be had from the object store, or put there: {type(error).__name__}"
    )


def _connect() -> None:
    """Be of the cluster that this host is of, where the program is of none yet."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False)
