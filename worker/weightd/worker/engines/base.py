"""The one interface behind which every engine stands."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Dict, NamedTuple, Sequence, Tuple

from weightd.protocol.errors import Internal, WeightdError
from weightd.protocol.messages import TensorSignature
from weightd.protocol.worker_messages import Traits

Arrays = Dict[str, Any]
"""Tensors by name: numpy arrays, native byte order, C order."""


class EngineMissing(WeightdError):
    """The engine cannot be used in this interpreter; the text says what to install."""


class BuildError(WeightdError):
    """The engine cannot build the model; the text is the cause."""


class Spoilt(Internal):
    """A predict failed in a way that may have spoilt the model: no further answer of it can be trusted."""


class Settings(NamedTuple):
    """How to build: `threads` that one predict uses, and the `device` ("cpu")."""

    threads: int
    device: str


class Signature(NamedTuple):
    """Inputs and outputs of a built model, as the engine takes and gives them (not as the file says)."""

    inputs: Tuple[TensorSignature, ...]
    outputs: Tuple[TensorSignature, ...]


class Shared(NamedTuple):
    """What a build shares: the `handle` to attach to, the bytes shared, and why it is less than hoped."""

    handle: str
    bytes: int
    note: str


class Engine(abc.ABC):
    """Runs one model. Built once, by one of `export`, `attach`; used from one thread.

    After an error from `export` or `attach`, or `Spoilt` from `predict`, the object is dead.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]

    @abc.abstractmethod
    def versions(self) -> Dict[str, str]:
        """Return the versions of the libraries that compute, by name."""

    @abc.abstractmethod
    def current_pid(self) -> str:
        """Return the engine's number for this process. Allowed before the build."""

    @abc.abstractmethod
    def load(self, model: str) -> None:
        """Build the model with weights of its own; a second call builds it anew.

        Raises:
            BuildError: the engine refuses the model.
        """

    @abc.abstractmethod
    def export(self, store: str, pids: Sequence[str]) -> Shared:
        """Let the processes `pids` share the weights of the loaded model.

        Args:
            store: path of a file that the engine may create for it, in a private directory.
            pids: the `current_pid` of each process that will attach.
        """

    @abc.abstractmethod
    def attach(self, model: str, handle: str) -> Shared:
        """Build the model on the weights behind `handle`; "" or a useless handle = with its own.

        Raises:
            BuildError: the engine refuses the model or the handle.
        """

    def settle(self, handle: str) -> None:
        """Give back what was only needed while processes attached."""

    @property
    @abc.abstractmethod
    def signature(self) -> Signature:
        """What the built model takes and gives."""

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model.

        Args:
            inputs: exactly the inputs of the signature, of its datatypes, ranks and fixed dimensions.

        Returns:
            The outputs, owned by the caller.

        Raises:
            InvalidArgument: the engine refuses these inputs; the model is as good as before.
            Spoilt: the predict failed; the engine must not be used again.
        """
