"""The interface of all engines: how one is made, what it builds and shares, and the errors that it may raise.

Libraries share weights at one of two moments. One that shares weights by itself has to know while it builds. For one
that does not, weightd shares memory as it is after a first predict, in which some libraries pack their weights::

    holder    build(model, pids=...)      predict    export(store)      trim_store(handle) when nobody attaches
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
"""Tensors by name: numpy arrays. As inputs in native byte order, in C order and aligned; as outputs in any form."""

Gears = Tuple[Tuple[int, ...], ...]
"""The sizes that a model was converted for: each gear gives those of all free dimensions, in the inputs' order."""


class BuildSettings(NamedTuple):
    """How to build.

    Attributes:
        threads: that one predict uses, on the CPU.
        device: "cpu", "cpu:N" for some of its cores, or "ascend:N" for the card of that number.
        is_sharing: False: each process has weights of its own.
        options: the engine's own, checked by it.
    """

    threads: int
    device: str
    is_sharing: bool = True
    options: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def card(self) -> Optional[int]:
        """The number of the card, None for the CPU.

        Raises:
            BuildError: the device is neither.
        """
        card = card_of(self.device)
        if card is None and not is_cpu(self.device):
            raise BuildError(f"device: expected cpu, cpu:N or ascend:N, got {self.device!r}")
        return card


class ModelSignature(NamedTuple):
    """Inputs and outputs of a built model, as the engine takes and gives them (not as the file says)."""

    inputs: Tuple[TensorSignature, ...]
    outputs: Tuple[TensorSignature, ...]


class Engine(abc.ABC):
    """Runs one model: from one thread, or predicts from as many at once as `concurrency` tells.

    After an error from `build`, or `ModelCorrupted` from `predict`, only a new build makes it usable; where
    `can_rebuild` is false there is none: only the end of the process gives back what the build took.
    """

    name: ClassVar[str]
    sharing: WeightSharing
    can_rebuild: ClassVar[bool] = True
    may_corrupt: ClassVar[bool] = True
    """Whether a predict may leave the model so that a later answer is wrong in silence."""
    is_limited_by_first_shape: ClassVar[bool] = False
    """Whether a model's first predict decides which shapes it can compute: the engine builds a new model for a shape
    that the first one does not cover."""
    was_rebuilt_larger: bool = False
    """Whether that has happened since `build`, or since somebody set it to False."""
    should_rebuild_per_shape: bool = False
    """Whether the engine builds a new model at each change of shape, set where answers depend on the shapes before."""

    @property
    def has_unshared_weights(self) -> bool:
        """Whether the engine has built a new model, whose weights are private until `reshare_weights` is called."""
        return False

    def reshare_weights(self) -> None:
        """Share the weights where `has_unshared_weights` is true. No other thread may do anything meanwhile."""
        raise NotImplementedError

    @property
    def max_shape(self) -> Optional[SelfTestCase]:
        """The largest shape of each input that the configuration allows, None where it sets none."""
        return None

    @abc.abstractmethod
    def versions(self) -> Dict[str, str]:
        """Return the versions of the libraries that compute, by name."""

    @abc.abstractmethod
    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build the model; a second call builds it anew, if `can_rebuild`.

        Args:
            model: path of the model.
            pids: in a holder, the `current_pid` of each process that will attach.
            handle: in a worker, what the holder exported; "" where it could not.

        Raises:
            BuildError: the engine refuses the model or the handle.
        """

    @abc.abstractmethod
    def update_weights(self, weights: Arrays) -> None:
        """Replace weights of the built model, by their names in the model.

        Raises:
            BuildError: the model was not built for it, or does not take these.
        """

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return what the card says of its memory; None on the CPU, or where it cannot be had."""

    @abc.abstractmethod
    def release_cached_memory(self) -> None:
        """Give back what the library keeps for the next predict of the built model, as far as it can be told to."""

    def discard_model(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Free the built model where its memory is not given back otherwise: no predict follows."""

    @property
    @abc.abstractmethod
    def signature(self) -> ModelSignature:
        """What the built model takes and gives."""

    @property
    def gears(self) -> Gears:
        """The only sizes that the built model takes; none: any, or nobody knows."""
        return ()

    @property
    def concurrency(self) -> int:
        """How many predicts of the built model may run at once, each in a thread of its own. Known before the build."""
        return 1

    @property
    def is_stochastic(self) -> bool:
        """Whether the built model may draw at random: a process that is copied from one with it would draw the same."""
        return False

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model.

        Args:
            inputs: exactly the inputs of the signature, of its datatypes, ranks and fixed dimensions.

        Returns:
            The outputs, owned by the caller.

        Raises:
            InvalidArgument: the engine refuses these inputs; the model is as good as before.
            ModelCorrupted: the predict failed; the next call must be `build`.
            MaybeCorrupted: another one did, that ran at the same time.
        """


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


class EngineMissing(WeightdError):
    """The engine cannot be used in this interpreter; the text says what to install."""


class BuildError(WeightdError):
    """The engine cannot build the model; the text is the cause."""


class OutOfDeviceMemory(BuildError):
    """The card has no memory, or no place for this process; that may be over soon."""


class AttachRefused(WeightdError):
    """No further process can be let in; the text says why."""


class NotRun(InvalidArgument):
    """The engine refuses a request before the model has seen it: the model cannot have changed."""


class ModelCorrupted(Internal):
    """A predict failed in a way that may have spoilt the model: no further answer of it can be trusted."""


class MaybeCorrupted(ModelCorrupted):
    """Another predict spoilt the model while this one ran: its answer may be wrong, and it is not to blame."""
