"""Models with several versions, and which version answers a request that names none. Uses no I/O and no clock."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.models.model import ServedModel
from weightd_protocol import limits
from weightd_protocol.errors import FailedPrecondition, InvalidArgument
from weightd_protocol.model_names import split_version
from weightd_protocol.schema import integer, text

Shares = Mapping[int, float]
"""The share of each version in the requests that name no version; the shares add up to 1."""


class VersionReadiness(enum.IntEnum):
    """Whether a version can answer a request."""

    UNAVAILABLE = 0  # it has failed, or only an operator loads it
    UNPROVEN = 1  # it is loading, or a request loads it; it was never loaded before
    LOADABLE = 2  # likewise, and it was loaded before
    SERVING = 3


@dataclass(frozen=True)
class ProvenRecord:
    """A version that was loaded, for the next daemon.

    Attributes:
        model: the name of the model with the version, NAME@VERSION.
        path: the path of its file.
        revision: the revision of its files, if they are in the repository.
    """

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    revision: int = field(metadata=integer(0, limits.MAX_COUNT))

    @property
    def key(self) -> str:
        """The name of the model, which identifies the record."""
        return self.model

    @classmethod
    def of(cls, name: str, config: ModelConfig) -> ProvenRecord:
        """Return the record of a model."""
        return cls(name, config.path, config.revision)


class ProvenVersions:
    """Knows which versions were loaded with their present files, by this daemon or by an earlier one.

    Args:
        models: returns the models that are served, by name.
    """

    def __init__(self, models: Callable[[], Mapping[str, ServedModel]]) -> None:
        self._models = models
        self._earlier: dict[str, ProvenRecord] = {}

    def was_loaded(self, model: ServedModel) -> bool:
        """Return whether this daemon or an earlier one has loaded the model."""
        return model.dispatcher.signature.built is not None or self.was_loaded_earlier(model.name, model.config)

    def was_loaded_earlier(self, name: str, config: ModelConfig) -> bool:
        """Return whether an earlier daemon has loaded this model."""
        return self._earlier.get(name) == ProvenRecord.of(name, config)

    def records(self) -> Iterator[ProvenRecord]:
        """Yield the versions that were loaded for the counter store."""
        for name, model in list(self._models().items()):
            if split_version(name)[1] and self.was_loaded(model):
                yield ProvenRecord.of(name, model.config)

    def restore(self, records: Sequence[ProvenRecord]) -> None:
        """Add the versions that an earlier daemon has loaded."""
        self._earlier = {each.model: each for each in records}


class VersionSet:
    """The versions of one model and their shares of its requests.

    Args:
        name: the name of the model.
        config: the versions and their traffic in the configuration.

    Attributes:
        config: the present configuration; a reload replaces it.
        rollout: the shares that an operator has set; they take precedence over the configuration. Empty if no operator
            has set shares.
    """

    def __init__(self, name: str, config: VersionSetConfig) -> None:
        self._name = name
        self.config = config
        self.rollout: Shares = {}

    def configure(self, config: VersionSetConfig) -> None:
        """Replace the configuration; a rollout ends if it names a version that has been removed."""
        self.config = config
        if not self.rollout.keys() <= set(config.versions):
            self.rollout = {}

    @property
    def shares(self) -> Shares:
        """The shares that are in force; empty if the newest version that can serve answers all requests."""
        if self.rollout:
            return self.rollout
        total = sum(weight for _, weight in self.config.traffic)
        return {version: weight / total for version, weight in self.config.traffic}

    def choose(self, request_id: str, readiness_of: Callable[[int], VersionReadiness]) -> int:
        """Return the version that answers a request.

        With shares, the id of the request decides, so the same id always gets the same version. Without shares, and if
        the version of the id is not available, it is the newest version that serves, or else the newest one that was
        loaded before, or else the newest one that loads or can be loaded.

        Args:
            request_id: the id of the request.
            readiness_of: returns the readiness of a version.
        """
        point = zlib.crc32(request_id.encode()) / 2**32
        for version, share in self.shares.items():
            point -= share
            if point < 0:
                if readiness_of(version):
                    return version
                break
        return max(self.config.versions, key=lambda each: (readiness_of(each), each))

    def start_rollout(self, version: int, percent: float, default: int) -> None:
        """Send a percentage of the requests to one version; the other versions keep their proportions among each other.

        Args:
            version: the version.
            percent: the percentage, 0 to 100.
            default: the version that answers all requests if there are no shares yet.

        Raises:
            InvalidArgument: the model has no such version.
            FailedPrecondition: `percent` is less than 100, but no other version has a share and could answer the
                remaining requests.
        """
        self._check_version(version)
        others = {each: share for each, share in (self.shares or {default: 1.0}).items() if each != version}
        total, share = sum(others.values()), percent / 100
        if share < 1 and not total:
            text = f"version {version} of {self._name} already answers all requests: name the version to roll out"
            raise FailedPrecondition(text)
        rest = {each: (1 - share) * part / total for each, part in others.items()} if share < 1 else {}
        self.rollout = dict(sorted({**rest, **({version: share} if share else {})}.items()))

    def promote(self, version: int) -> None:
        """Send all requests to a version.

        Raises:
            InvalidArgument: the model has no such version.
        """
        self._check_version(version)
        self.rollout = {version: 1.0}

    def abort(self) -> None:
        """Return to the shares in the configuration.

        Raises:
            FailedPrecondition: no rollout has changed the shares.
        """
        if not self.rollout:
            raise FailedPrecondition(f"no rollout of {self._name} is in progress")
        self.rollout = {}

    def _check_version(self, version: int) -> None:
        if version not in self.config.versions:
            known = ", ".join(map(str, self.config.versions))
            raise InvalidArgument(f"version: expected one of {known} of {self._name}, got {version}")
