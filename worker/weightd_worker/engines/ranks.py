"""Interface of an engine that runs one rank of a model: one of several processes that compute each answer together.

All ranks of a rank group must get the same requests in the same order. If they do not, no library detects this: the
library adds up data of different requests, and the answer is wrong without an error. Therefore the daemon sends each
request to all ranks, and if one rank fails, the daemon stops the whole group. The only exception is a request that all
ranks reject before they have sent data to each other (`RankRejected`).
"""

from __future__ import annotations

import abc
import types
from typing import Any, ClassVar, Mapping, NamedTuple, Optional

from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, ModelSignature


class RankRejected(InvalidArgument):
    """This rank, like every rank of its group, rejects the inputs. No data was sent, so the group is intact."""


class RankRendezvous(NamedTuple):
    """Settings with which a process joins its rank group.

    Attributes:
        rank: the number of this rank, from 0.
        rank_count: the number of ranks in the group.
        device: "cpu", "cpu:N" or "ascend:N", as in `BuildSettings`.
        threads: the number of CPU threads that run one predict.
        host: the host at which the broker listens; "" if the engine needs no broker.
        port: the port of the broker; 0 if the engine needs no broker.
        rank_table: path of the rank table, a file with the addresses of all ranks' cards; "" if the engine needs none.
        group_info: path of the file that lists communication groups, which are subsets of the ranks; "" for none.
        connect_timeout_s: seconds within which all ranks must join the group.
        exec_timeout_s: seconds for which a rank waits for other ranks in a predict.
        buffer_mib: size of the buffer on the card for each communication group in MiB; 0 for the library's default.
    """

    rank: int
    rank_count: int
    device: str
    threads: int = 1
    host: str = ""
    port: int = 0
    rank_table: str = ""
    group_info: str = ""
    connect_timeout_s: int = 120
    exec_timeout_s: int = 68
    buffer_mib: int = 0


class RankEngine(abc.ABC):
    """Interface of an object that runs one rank of a model.

    A process makes only one such object, and calls `join_group` and `load` once. All calls come from one thread.

    Raises:
        EngineMissing: the library cannot be used in this interpreter.
        BuildError: the rendezvous is not valid for this engine.
    """

    name: ClassVar[str]
    needs_broker: ClassVar[bool] = False
    """Whether a rank group needs a broker: an additional process that runs `serve_broker`."""

    def __init__(self, rendezvous: RankRendezvous) -> None:
        self._rendezvous = rendezvous

    @classmethod
    def load_broker(cls, rendezvous: RankRendezvous) -> None:
        """Import the modules that a broker needs. This may take seconds, so it happens while the ranks are starting.

        Raises:
            EngineMissing: the library cannot be used in this interpreter.
        """
        del rendezvous

    @classmethod
    def serve_broker(cls, rendezvous: RankRendezvous) -> None:
        """Run the broker, through which the ranks find each other, until all ranks have left the group.

        Raises:
            EngineMissing: the library cannot be used in this interpreter.
            BuildError: the ranks have not joined in time, or a rank was lost.
        """
        raise NotImplementedError(f"{cls.name} has no broker: {rendezvous}")

    @abc.abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that run the model, by name of the library."""

    @abc.abstractmethod
    def join_group(self) -> None:
        """Join the rank group. If the engine has a broker, the method returns when all ranks have joined.

        Raises:
            BuildError: the other ranks have not joined in time, or the library fails.
        """

    @abc.abstractmethod
    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        """Load this rank's slice, and return the model's signature.

        Raises:
            BuildError: the engine rejects the file or one of the options, which are specific to the engine.
        """

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Compute this rank's part of an answer, together with the other ranks.

        Args:
            inputs: exactly the inputs of the signature, with the signature's datatypes, ranks and fixed dimensions.

        Returns:
            The outputs that this rank has computed. A later predict does not change these arrays.

        Raises:
            RankRejected: the inputs were rejected before any data was sent to other ranks.
            ModelCorrupted: the predict failed, so the rank group is lost and this process must exit.
        """

    @abc.abstractmethod
    def leave_group(self) -> None:
        """Notify the broker, if the engine has one, that this rank exits normally. This must be the last call."""

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card; None on the CPU, or if it cannot be read."""
