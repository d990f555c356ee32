"""Published models in Ray's object store: a detached actor owns the chunks of each model, and replicas fetch them."""

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

# The Ray namespace of the store actors, common to all applications, so that all replicas find the models.
_NAMESPACE = "weightd"

# Bytes of a chunk. The publisher, the actor and a replica each hold one chunk in memory, and the object store must have
# room for a chunk beside its other objects.
_CHUNK_BYTES = 8 * 1024 * 1024

# Seconds to fetch one chunk from another node, or from disk if the store has spilled it.
_CHUNK_TIMEOUT_S = 120.0

Chunk = Any

Content = tuple[Sequence[PublishedFile], Sequence[Sequence[ray.ObjectRef[Chunk]]]]


class ModelStoreActor:
    """Actor that owns the chunks of one model; the object store keeps them as long as the actor lives."""

    def __init__(self) -> None:
        self._files: list[PublishedFile] = []
        self._chunks: list[list[ray.ObjectRef[Chunk]]] = []
        self._is_complete = False

    def begin_file(self, name: str, nbytes: int) -> None:
        """Begin another file, to which the chunks that follow are added."""
        self._files.append(PublishedFile(name, nbytes))
        self._chunks.append([])

    def add_chunk(self, chunk: Chunk) -> None:
        """Store the next chunk of the current file."""
        self._chunks[-1].append(ray.put(chunk))

    def finish(self) -> None:
        """Mark the model as complete."""
        self._is_complete = True

    def content(self) -> Content | None:
        """Return the files and the chunks of each file; None until the model is complete."""
        return (self._files, self._chunks) if self._is_complete else None


def publish(path: str | os.PathLike[str]) -> str:
    """Publish the files of a model in the object store; return the name of the model there, "sha256:…".

    Raises:
        ModelFileError: the files cannot be read, or have changed in the meantime.
        Unavailable: another process is publishing the model or was interrupted, or the store has no space left.
    """
    _connect()
    with OpenModel(Path(path)) as model:
        # The digest is computed from the path, but the files are already open. `check_unchanged` verifies later that
        # the path still refers to these files.
        sha256 = digest(Path(path))
        options = {"name": sha256, "namespace": _NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        try:
            store = ray.remote(ModelStoreActor).options(**options).remote()
        except ValueError:
            # Ray raises this error if an actor of this name exists. If the model is completely published, return its
            # name; if it is still being published, `_get_content` raises `Unavailable`.
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
    """Remove a model from the object store.

    Raises:
        NotFound: the model is not published.
    """
    _connect()
    ray.kill(_get_store(model.removeprefix(PUBLISHED_PREFIX)))


async def fetch(sha256: str, base: Path) -> CachedModel:
    """Return a published model as files on this host. A separate thread fetches the files.

    Raises:
        RequestError: the model is not available.
    """
    return await asyncio.to_thread(ModelCache(base).take, sha256, _Store(sha256))


class _Store:
    """A published model in the object store, which is accessed only if the cache needs the model's files."""

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
    """Store a file chunk by chunk; the next chunk is read after the previous one has been stored."""
    ray.get(store.begin_file.remote(file.name, file.nbytes))
    with model.open(file) as content:
        while chunk := content.read(_CHUNK_BYTES):
            # A chunk is sent as a numpy array, because Ray deserializes arrays without a copy.
            ray.get(store.add_chunk.remote(np.frombuffer(chunk, np.uint8)))


def _get_content(sha256: str) -> Content:
    try:
        content: Content | None = ray.get(_get_store(sha256).content.remote(), timeout=_CHUNK_TIMEOUT_S)
    except RayError as error:
        raise _unavailable(sha256, error) from None
    if content is None:
        raise Unavailable(f"{PUBLISHED_PREFIX}{sha256} is being published; if its publisher has exited, unpublish it")
    return content


def _get_store(sha256: str) -> Any:
    try:
        return ray.get_actor(sha256, _NAMESPACE)
    except ValueError:
        raise NotFound(f"no model {PUBLISHED_PREFIX}{sha256} is published in this cluster") from None


def _unavailable(sha256: str, error: RayError) -> Unavailable:
    return Unavailable(
        f"{PUBLISHED_PREFIX}{sha256} cannot be read from or written to the object store: {type(error).__name__}"
    )


def _connect() -> None:
    """Connect to the Ray cluster of this host, unless the process is already connected to a cluster."""
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False)
