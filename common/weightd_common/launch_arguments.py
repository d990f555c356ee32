"""JSON arguments that the daemon passes to worker processes: the models of a group, and the rendezvous of ranks."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple


class GroupMember(NamedTuple):
    """Arguments for one model of a model group.

    Attributes:
        model: the path of the model's snapshot. Models that share weights have the same path.
        snapshot_identity: the identity and digest of the snapshot, or "". If the files of the snapshot still have this
            identity, the worker uses the digest and need not read the files.
        options: the engine options of the model, as JSON.
        sample: the path of an .npz file of inputs for the self-test, or "" to generate the inputs.
        tolerance: the largest accepted difference between two answers to the same self-test inputs.
    """

    model: str
    snapshot_identity: str = ""
    options: str = "{}"
    sample: str = ""
    tolerance: float = 0.0


class GroupMembers(NamedTuple):
    """Arguments for a process that runs a model group.

    Attributes:
        sharing: the memory that the models share: "workspace" (the memory of predicts), "weights" or "both".
        models: the models, in the order in which the daemon numbers them.
    """

    sharing: str
    models: Tuple[GroupMember, ...]

    def json(self) -> str:
        """Return the arguments as JSON text."""
        models: List[Dict[str, Any]] = [each._asdict() for each in self.models]
        return json.dumps({"share": self.sharing, "models": models}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GroupMembers:
        """Parse the result of `json`.

        Raises:
            ValueError: the text has another form.
        """
        try:
            parsed = json.loads(text)
            return cls(parsed["share"], tuple(GroupMember(**each) for each in parsed["models"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"expected model group arguments, got {text!r}: {error}") from None


def joint_digest(digests: Sequence[str]) -> str:
    """Return the digest of a model group, computed from the digests of its models in the group's order."""
    return hashlib.sha256("".join(f"{each}\n" for each in digests).encode("ascii")).hexdigest()


class RendezvousInfo(NamedTuple):
    """Arguments of a rank, or of the broker of a rank group.

    Attributes:
        rank: the number of this rank, from 0; -1 for a broker.
        size: the number of ranks in the rank group.
        connect_timeout_s: seconds within which all ranks must have connected to each other.
        exec_timeout_s: seconds for which a rank waits for another rank in a predict.
        reply_rank: the rank whose outputs are the answer to a request; None if the answer consists of the outputs of
            all ranks, concatenated.
        host: the host at which the broker listens.
        port: the port of the broker; 0 without a broker.
        rank_table: the path of the rank table, a file with the addresses of all ranks' cards, or "".
        group_info: the path of the file that lists communication groups, which are subsets of the ranks, or "".
        buffer_mib: size of the communication buffer on the card for each communication group, in MiB; 0 without a card.
        cores: the core list to which the process is bound once it serves; "" to keep the current cores.
    """

    rank: int
    size: int
    connect_timeout_s: int
    exec_timeout_s: int
    reply_rank: Optional[int] = None
    host: str = "127.0.0.1"
    port: int = 0
    rank_table: str = ""
    group_info: str = ""
    buffer_mib: int = 0
    cores: str = ""

    @property
    def has_outputs(self) -> bool:
        """Whether this rank returns outputs, complete or in part."""
        return self.reply_rank in (None, self.rank)

    def json(self) -> str:
        """Return the arguments as JSON text."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RendezvousInfo:
        """Parse the result of `json`.

        Raises:
            ValueError: the text has another form.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"expected rendezvous arguments, got {text!r}: {error}") from None
