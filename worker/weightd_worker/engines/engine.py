"""Interface of all engines: construction, builds, weight sharing and errors.

Libraries share weights at one of two moments. A library that shares weights itself has to know at the build. For the
others weightd shares memory, after a first predict, in which some libraries pack their weights::

    holder    build(model, pids=...)      predict    export(store)      trim_store(handle) when no worker attaches
    worker    build(model, handle=...)    predict    attach(handle)
"""

from __future__ import annotations

import abc
import os
import types
from typing import Any, ClassVar, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from weightd_common.devices import card_of, is_cpu
from weightd_protocol.errors import Internal, InvalidArgument, WeightdError
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import DeviceMemory, SelfTestCase, SharingTraits

Arrays = Dict[str, Any]
"""Numpy arrays by tensor name. Inputs are in native byte order, in C order and aligned; outputs may have any layout."""

Gears = Tuple[Tuple[int, ...], ...]
"""The sizes that a model was converted for. Each gear has the sizes of all free dimensions, in the inputs' order."""


class BuildSettings(NamedTuple):
    """Settings of a build.

    Attributes:
        threads: the number of threads of one predict, on the CPU.
        device: "cpu", "cpu:N" for some of its cores, or "ascend:N" for the card of that number.
        is_sharing: whether processes share weights; otherwise each has a private copy.
        options: options specific to the engine, which checks them.
    """

    threads: int
    device: str
    is_sharing: bool = True
    options: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def card(self) -> Optional[int]:
        """The number of the card, None for the CPU.

        Raises:
            BuildError: the device is neither a card nor the CPU.
        """
        card = card_of(self.device)
        if card is None and not is_cpu(self.device):
            raise BuildError(f"device: expected cpu, cpu:N or ascend:N, got {self.device!r}")
        return card


class ModelSignature(NamedTuple):
    """Inputs and outputs of a built model, according to the engine, which may differ from the model's file."""

    inputs: Tuple[TensorSignature, ...]
    outputs: Tuple[TensorSignature, ...]


class Engine(abc.ABC):
    """Runs one model. One thread calls it, except that up to `concurrency` threads may call `predict` at once.

    After an error from `build`, or `ModelCorrupted` from `predict`, the engine is usable only after a new build. If
    `can_rebuild` is false, there can be no new build, and only the end of the process frees its memory.
    """

    name: ClassVar[str]
    sharing: WeightSharing
    can_rebuild: ClassVar[bool] = True
    may_corrupt: ClassVar[bool] = True
    """Whether a predict may corrupt the model, so that a later answer is wrong without an error."""
    is_limited_by_first_shape: ClassVar[bool] = False
    """Whether a model's first predict determines which shapes it can compute: the engine builds a new model for a shape
    that the first one does not cover."""
    was_rebuilt_larger: bool = False
    """Whether the engine has built a model for larger shapes since `build`, or since a caller reset this to False."""
    should_rebuild_per_shape: bool = False
    """Whether the engine builds a new model at each change of shape. Set if answers depend on the shapes before."""

    @property
    def has_unshared_weights(self) -> bool:
        """Whether the engine has built a new model, whose weights are private until `reshare_weights` is called."""
        return False

    def reshare_weights(self) -> None:
        """Share the weights when `has_unshared_weights` is true. No other thread may do anything meanwhile."""
        raise NotImplementedError

    @property
    def max_shape(self) -> Optional[SelfTestCase]:
        """The largest shape of each input that the configuration allows, None if it sets none."""
        return None

    @abc.abstractmethod
    def versions(self) -> Dict[str, str]:
        """Return the versions of the libraries that compute, by name."""

    @abc.abstractmethod
    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build the model. A second call builds it anew, if `can_rebuild`.

        Args:
            model: path of the model.
            pids: in a holder, the `current_pid` of each process that will attach.
            handle: in a worker, the handle that the holder has exported; "" if it has none.

        Raises:
            BuildError: the engine rejects the model or the handle.
        """

    @abc.abstractmethod
    def update_weights(self, weights: Arrays) -> None:
        """Replace weights of the built model, by their names in the model.

        Raises:
            BuildError: the engine or the model does not allow it, or does not accept these weights.
        """

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card; None on the CPU, or if they are not known."""

    @abc.abstractmethod
    def release_cached_memory(self) -> None:
        """Release the memory that the library keeps for the next predict of the built model, where it can."""

    def discard_model(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Free the built model, in engines whose memory is not freed otherwise. No predict may follow."""

    @property
    @abc.abstractmethod
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the built model."""

    @property
    def gears(self) -> Gears:
        """The only sizes of free dimensions that the built model accepts; empty: any, or they are not known."""
        return ()

    @property
    def concurrency(self) -> int:
        """How many predicts of the model may run at once, each in a separate thread. Known before the build."""
        return 1

    @property
    def is_stochastic(self) -> bool:
        """Whether the built model may draw random numbers: processes forked from it would all draw the same."""
        return False

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model.

        Args:
            inputs: exactly the inputs of the signature, with its datatypes, ranks and fixed dimensions.

        Returns:
            The outputs, owned by the caller.

        Raises:
            InvalidArgument: the engine rejects these inputs; the model is intact.
            ModelCorrupted: the predict failed; the next call must be `build`.
            MaybeCorrupted: another predict failed that ran at the same time.
        """


class SharedWeights(NamedTuple):
    """Result of sharing: the `handle` to attach to, the bytes that are shared, and a note why not all of them are.

    `has_sharing_failed`: the weights could have been shared, but something prevented it.
    """

    handle: str
    shared_bytes: int
    note: str
    has_sharing_failed: bool = False


class WeightSharing(abc.ABC):
    """Shares the weights of one engine's built model.

    After an error from `export` or `attach` the engine is usable only after a new build.
    """

    traits: SharingTraits

    @abc.abstractmethod
    def current_pid(self) -> str:
        """Return the engine's number for this process. May be called before the build."""

    @abc.abstractmethod
    def export(self, store: str) -> SharedWeights:
        """Share the weights of the built model with the processes that the build has named.

        Args:
            store: path of a file in a private directory, which the engine may create.
        """

    @abc.abstractmethod
    def allow(self, pids: Sequence[str]) -> None:
        """Let further processes attach to the exported weights.

        Raises:
            AttachRefused: the library cannot do that.
        """

    @abc.abstractmethod
    def attach(self, handle: str) -> SharedWeights:
        """Use the weights behind the handle that the model was built with, as far as possible."""

    @abc.abstractmethod
    def trim_store(self, handle: str) -> None:
        """Free resources that only attaching processes needed. A failure is only logged."""


class NotShared(WeightSharing):
    """Weight sharing that shares nothing: each process has a private copy of the weights."""

    traits = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def current_pid(self) -> str:
        """Return this process's pid."""
        return str(os.getpid())

    def export(self, store: str) -> SharedWeights:
        """Share nothing."""
        return SHARING_IS_OFF

    def allow(self, pids: Sequence[str]) -> None:
        """Do nothing: nothing was exported."""

    def attach(self, handle: str) -> SharedWeights:
        """Attach to nothing."""
        return SHARING_IS_OFF

    def trim_store(self, handle: str) -> None:
        """Do nothing."""


SHARING_IS_OFF = SharedWeights("", 0, "sharing is off")


class EngineMissing(WeightdError):
    """The engine cannot be used in this interpreter. The text says what to install."""


class BuildError(WeightdError):
    """The engine cannot build the model. The text is the cause."""


class OutOfDeviceMemory(BuildError):
    """The card has no memory, or no place for another process, which may soon change."""


class AttachRefused(WeightdError):
    """No further process can be allowed to attach. The text is the cause."""


class NotRun(InvalidArgument):
    """The engine has rejected a request before the model has seen it, so the model is intact."""


class ModelCorrupted(Internal):
    """A failed predict may have corrupted the model, so that none of its later answers can be trusted."""


class MaybeCorrupted(ModelCorrupted):
    """Another predict corrupted the model while this one ran, so that this one's answer may be wrong."""
