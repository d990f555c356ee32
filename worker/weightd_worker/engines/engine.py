"""Interface of all engines: construction, builds, weight sharing and errors.

Weights are shared at one of two times. A library that can share weights itself needs the pids or the handle when it
builds the model. For other libraries, weightd shares memory pages after a first predict, because some libraries
rearrange their weights in this predict. So all engines have these steps::

    holder    build(model, pids=...)      predict    export(store)      trim_store(handle) when no worker is attaching
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
"""All gears of a converted model. A gear is a combination of sizes that the model supports: one size for each free
dimension of all inputs, in the order of the inputs. The model supports no other combinations.
"""


class BuildSettings(NamedTuple):
    """Settings with which an engine builds a model.

    Attributes:
        threads: the number of CPU threads that run one predict.
        device: "cpu", "cpu:N" for a set of its cores, or "ascend:N" for card N.
        is_sharing: whether processes share the weights. If not, each process has a private copy.
        options: the engine's options, which the engine checks.
    """

    threads: int
    device: str
    is_sharing: bool = True
    options: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def card(self) -> Optional[int]:
        """The number of the card in `device`; None for the CPU.

        Raises:
            BuildError: the device is neither a card nor the CPU.
        """
        card = card_of(self.device)
        if card is None and not is_cpu(self.device):
            raise BuildError(f"device: expected cpu, cpu:N or ascend:N, got {self.device!r}")
        return card


class ModelSignature(NamedTuple):
    """Inputs and outputs of a built model as the engine reports them.

    They may differ from the inputs and outputs that the model's file declares.
    """

    inputs: Tuple[TensorSignature, ...]
    outputs: Tuple[TensorSignature, ...]


class Engine(abc.ABC):
    """Interface of an object that builds and runs one model.

    All calls must come from one thread, except that up to `concurrency` threads may call `predict` at once. If `build`
    fails, or `predict` raises `ModelCorrupted`, the caller must call `build` again before it uses the engine. If
    `can_rebuild` is false, a second build is impossible: the process must exit, which also frees the model's memory.
    """

    name: ClassVar[str]
    sharing: WeightSharing
    can_rebuild: ClassVar[bool] = True
    may_corrupt: ClassVar[bool] = True
    """Whether a predict may corrupt the model, so that later answers are wrong without an error."""
    is_limited_by_first_shape: ClassVar[bool] = False
    """Whether the first predict of a built model limits the shapes of later predicts. If so, the engine itself builds
    the model again for larger shapes."""
    was_rebuilt_larger: bool = False
    """Whether the engine itself has built the model again for larger shapes since the last call of `build`. Callers may
    reset this to False."""
    shares_pages: bool = True
    """Whether pages of the next build may be shared through a page store. Callers set this to False if workers are
    forked from this process, or if nothing is shared: an engine may then build faster."""
    should_rebuild_per_shape: bool = False
    """Whether the engine builds the model again whenever the shapes of the inputs change. Callers set this if answers
    depend on the shapes of earlier predicts."""

    @property
    def has_unshared_weights(self) -> bool:
        """Whether the engine has built the model again, with weights that are private until `reshare_weights`."""
        return False

    def reshare_weights(self) -> None:
        """Share the weights of a model that was built again; call it when `has_unshared_weights` is true.

        All other threads of the process must be idle during the call.
        """
        raise NotImplementedError

    @property
    def max_shape(self) -> Optional[SelfTestCase]:
        """The configured maximum shape of each input; None if the configuration sets no maximum."""
        return None

    @abc.abstractmethod
    def versions(self) -> Dict[str, str]:
        """Return the versions of the libraries that run the model, by name of the library."""

    @abc.abstractmethod
    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build the model. If `can_rebuild` is true, further calls build the model again.

        Args:
            model: path of the model file.
            pids: in a holder, the `current_pid` of each process that will attach to the weights.
            handle: in a worker, the handle that the holder has exported; "" if the holder has exported no weights.

        Raises:
            BuildError: the engine rejects the model or the handle.
        """

    @abc.abstractmethod
    def update_weights(self, weights: Arrays) -> None:
        """Replace some weights of the built model. `weights` has an array for the name of each of these weights.

        Raises:
            BuildError: the engine or the model does not support this, or the library rejects these weights.
        """

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card; None on the CPU, or if it cannot be read."""

    @abc.abstractmethod
    def release_cached_memory(self) -> None:
        """Free the memory that the library keeps for the next predict, if the library supports this."""

    def discard_model(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Free the memory of the built model, if the engine supports this. Call `build` before the next predict.

        A holder, which runs no requests, calls this method after it has exported the weights.
        """

    @property
    @abc.abstractmethod
    def signature(self) -> ModelSignature:
        """The inputs and outputs of the built model."""

    @property
    def gears(self) -> Gears:
        """The only sizes of free dimensions that the built model accepts; empty if it accepts any, or if unknown."""
        return ()

    @property
    def concurrency(self) -> int:
        """Maximum number of predicts that may run at once, each in a separate thread.

        This number is known before the build.
        """
        return 1

    def is_stochastic(self, model: str) -> bool:
        """Return whether predicts may draw random numbers. Processes forked from this one would draw the same numbers.

        Args:
            model: path of the model file. The model need not be built.
        """
        del model
        return False

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model.

        Args:
            inputs: exactly the inputs of the signature, with the signature's datatypes, ranks and fixed dimensions.

        Returns:
            The outputs. A later predict does not change these arrays.

        Raises:
            InvalidArgument: the engine rejects these inputs. The model is still intact.
            ModelCorrupted: the predict failed. The next call must be `build`.
            MaybeCorrupted: another predict failed while this predict ran. The next call must be `build`.
        """


class SharedWeights(NamedTuple):
    """Result of `WeightSharing.export` or `WeightSharing.attach`.

    Attributes:
        handle: the handle to which workers attach; "" if no weights are shared.
        shared_bytes: the size of the shared weights in bytes.
        note: why weights are not or not fully shared, for the operator; "" without a reason.
        has_sharing_failed: whether an error has prevented the sharing, although the model has weights to share.
    """

    handle: str
    shared_bytes: int
    note: str
    has_sharing_failed: bool = False


class WeightSharing(abc.ABC):
    """Interface of an object that shares the weights of an engine's built model between processes.

    If `export` or `attach` fails, the caller must build the model again before it uses the engine.
    """

    traits: SharingTraits

    @abc.abstractmethod
    def current_pid(self) -> str:
        """Return the number by which the engine identifies this process. May be called before the build."""

    @abc.abstractmethod
    def export(self, store: str) -> SharedWeights:
        """Share the weights of the built model with other processes.

        For some engines, only the processes in the argument `pids` of `Engine.build` can attach.

        Args:
            store: path in a private directory, at which the method may create a page store.
        """

    @abc.abstractmethod
    def allow(self, pids: Sequence[str]) -> None:
        """Let further processes attach to the exported weights.

        Raises:
            AttachRefused: the library cannot allow further processes.
        """

    @abc.abstractmethod
    def attach(self, handle: str) -> SharedWeights:
        """Use the holder's weights instead of private ones, as far as possible.

        The caller has passed the same handle to `build`.
        """

    @abc.abstractmethod
    def trim_store(self, handle: str) -> None:
        """Free the resources of the handle that only attaching processes need. A failure is only logged."""


class NotShared(WeightSharing):
    """Implementation of `WeightSharing` without sharing: each process has a private copy of the weights."""

    traits = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def current_pid(self) -> str:
        """Return this process's pid."""
        return str(os.getpid())

    def export(self, store: str) -> SharedWeights:
        """Share nothing."""
        return SHARING_IS_OFF

    def allow(self, pids: Sequence[str]) -> None:
        """Do nothing: no weights were exported."""

    def attach(self, handle: str) -> SharedWeights:
        """Attach to nothing."""
        return SHARING_IS_OFF

    def trim_store(self, handle: str) -> None:
        """Do nothing."""


SHARING_IS_OFF = SharedWeights("", 0, "sharing is off")


class EngineMissing(WeightdError):
    """The engine cannot be used in this interpreter. The text says what to install."""


class BuildError(WeightdError):
    """The engine cannot build the model. The text gives the reason."""


class OutOfDeviceMemory(BuildError):
    """The card has no free memory, or cannot serve another process now. A later try may succeed."""


class AttachRefused(WeightdError):
    """The holder cannot allow a further process to attach. The text gives the reason."""


class NotRun(InvalidArgument):
    """The engine has rejected a request before the model has run on it, so the model is intact."""


class ModelCorrupted(Internal):
    """A failed predict may have corrupted the model, so that none of its later answers can be trusted."""


class MaybeCorrupted(ModelCorrupted):
    """Another predict corrupted the model while this predict ran, so that the answer of this predict may be wrong."""
