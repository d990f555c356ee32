"""Interface of an engine that runs one rank of a model: one of several processes that compute each answer together.

All ranks of a group must get the same inputs in the same order. No library detects it if they do not: it adds up
whatever arrives, and the answer is wrong without an error. So the daemon sends the same to all ranks, and a failure of
one rank ends all of them. The only exception is an input that each rank rejects alike, before anything is sent to the
others (`RankRejected`).
"""

from __future__ import annotations

import abc
import types
from typing import Any, ClassVar, Mapping, NamedTuple, Optional

from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, ModelSignature


class RankRejected(InvalidArgument):
    """This rank, and so every rank of its group, rejects the inputs. Nothing was sent, so the group is intact."""


class RankRendezvous(NamedTuple):
    """Settings with which a process joins its group.

    Attributes:
        rank: of this process, from 0.
        rank_count: the number of ranks.
        device: as in `BuildSettings`.
        threads: the number of threads of one predict, on the CPU.
        host: where the broker listens, "" if the engine has none.
        port: of the broker, 0 if the engine has none.
        rank_table: path of the rank table, "" if the engine needs none.
        group_info: path of the file that describes groups of ranks within the group, "" for none.
        connect_timeout_s: seconds within which all ranks have to join.
        exec_timeout_s: seconds after which a rank stops waiting for the others in a predict.
        buffer_mib: MiB of a card for the messages of each group of ranks within the group; 0: the library's default.
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
    """Runs one rank, with all calls from one thread. A process makes one engine, joins once and loads once.

    Raises:
        EngineMissing: the library cannot be used in this interpreter.
        BuildError: the rendezvous is not valid for this engine.
    """

    name: ClassVar[str]
    needs_broker: ClassVar[bool] = False
    """Whether a group needs an additional process that runs `serve_broker`."""

    def __init__(self, rendezvous: RankRendezvous) -> None:
        self._rendezvous = rendezvous

    @classmethod
    def load_broker(cls, rendezvous: RankRendezvous) -> None:
        """Load the modules that a broker needs, which may take seconds, while the ranks load theirs.

        Raises:
            EngineMissing: as the class.
        """
        del rendezvous

    @classmethod
    def serve_broker(cls, rendezvous: RankRendezvous) -> None:
        """Run the broker, by which the ranks find each other, until all of them have left.

        Raises:
            EngineMissing: as the class.
            BuildError: the ranks have not joined in time, or one of them was lost.
        """
        raise NotImplementedError(f"{cls.name} has no broker: {rendezvous}")

    @abc.abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that compute, by name."""

    @abc.abstractmethod
    def join_group(self) -> None:
        """Join the group. If the engine has a broker, return when all ranks have joined.

        Raises:
            BuildError: the other ranks have not joined in time, or the library fails.
        """

    @abc.abstractmethod
    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        """Load this rank's slice, and return the model's signature.

        Raises:
            BuildError: the engine rejects the file or an option. The options are specific to the engine.
        """

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Compute this rank's part of an answer, together with the other ranks.

        Args:
            inputs: exactly the inputs of the signature, with its datatypes, ranks and fixed dimensions.

        Returns:
            The outputs as this rank has them, owned by the caller.

        Raises:
            RankRejected: the inputs were rejected before anything was sent.
            ModelCorrupted: the group is lost, and this process can only exit.
        """

    @abc.abstractmethod
    def leave_group(self) -> None:
        """Tell the broker, if there is one, that this rank exits normally. No other call may follow."""

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card; None on the CPU, or if they are not known."""
