"""The interface of an engine that runs one rank of a model: one of several processes that compute each answer together.

All ranks of a group are given the same inputs in the same order. Nobody notices if they are not: the library adds up
whatever arrives, and the answer is wrong without an error. So the daemon gives the same to all, and what fails in one
of them ends them all; the only exception is what each refuses alike before anything is sent to the others
(`RankRejected`).
"""

from __future__ import annotations

import abc
import types
from typing import Any, ClassVar, Mapping, NamedTuple, Optional

from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, ModelSignature


class RankRejected(InvalidArgument):
    """This rank, and so each of its group, refuses these inputs. Nothing was sent to another one: all is as before."""


class RankRendezvous(NamedTuple):
    """Who meets where: what one process needs to know to join its group.

    Attributes:
        rank: of this process, from 0.
        rank_count: how many ranks there are.
        device: as in `BuildSettings`.
        threads: that one predict uses, on the CPU.
        host: where the broker listens, "" where the engine has none.
        port: of the broker, 0 where the engine has none.
        rank_table: path of the rank table, "" where the engine needs none.
        group_info: path of the file that describes groups of ranks within the group, "" for none.
        connect_timeout_s: seconds within which all have to come.
        exec_timeout_s: seconds after which a rank gives up waiting for the others in a predict.
        buffer_mib: of a card, for what each group of ranks within the group sends; 0: as much as the library takes.
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
    """Runs one rank, all of it from one thread. A process makes one, enters once and loads once.

    Raises:
        EngineMissing: its library cannot be used in this interpreter.
        BuildError: the meeting cannot be.
    """

    name: ClassVar[str]
    needs_broker: ClassVar[bool] = False
    """Whether a group needs a process beside the ranks, that runs `serve_broker`."""

    def __init__(self, rendezvous: RankRendezvous) -> None:
        self._rendezvous = rendezvous

    @classmethod
    def load_broker(cls, rendezvous: RankRendezvous) -> None:
        """Load what a broker needs, which may take seconds: meanwhile the ranks load what they need.

        Raises:
            EngineMissing: as the class.
        """
        del rendezvous

    @classmethod
    def serve_broker(cls, rendezvous: RankRendezvous) -> None:
        """Be the process by which the ranks find each other; returns when all of them have left.

        Raises:
            EngineMissing: as the class.
            BuildError: they have not come, or one of them was lost.
        """
        raise NotImplementedError(f"{cls.name} has no broker: {rendezvous}")

    @abc.abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that compute, by name."""

    @abc.abstractmethod
    def join_group(self) -> None:
        """Join the group; where the engine has a broker, this returns when all have.

        Raises:
            BuildError: the others have not come in time, or the library refuses.
        """

    @abc.abstractmethod
    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        """Load this rank's slice, and return what the model takes and gives.

        Raises:
            BuildError: the engine refuses the file, or an option, which are its own.
        """

    @abc.abstractmethod
    def predict(self, inputs: Arrays) -> Arrays:
        """Compute this rank's part of an answer, with the others.

        Args:
            inputs: exactly the inputs of the signature, of its datatypes, ranks and fixed dimensions.

        Returns:
            The outputs as this rank has them, owned by the caller.

        Raises:
            RankRejected: before anything was sent.
            ModelCorrupted: the group is lost; this process can only end.
        """

    @abc.abstractmethod
    def leave_group(self) -> None:
        """Tell the broker, if there is one, that this rank ends well: before its process does, and after all else."""

    @abc.abstractmethod
    def memory(self) -> Optional[DeviceMemory]:
        """Return what the card says of its memory; None on the CPU, or where it cannot be had."""
