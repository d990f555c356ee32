"""Arguments, as JSON, that the daemon passes to worker processes: the models of a group, and how ranks meet."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple


class GroupMember(NamedTuple):
    """One of the models of a process.

    Attributes:
        model: the path of its snapshot; two that are to share weights have one.
        snapshot_identity: its identity and digest, by which it is not read again.
        options: of the engine, as JSON.
        sample: an .npz of inputs to prove it by, or "".
        tolerance: how far apart answers to these may be.
    """

    model: str
    snapshot_identity: str = ""
    options: str = "{}"
    sample: str = ""
    tolerance: float = 0.0


class GroupMembers(NamedTuple):
    """The models of a process, in their order.

    Attributes:
        sharing: what they have in common: "workspace", "weights" or "both".
        models: which they are.
    """

    sharing: str
    models: Tuple[GroupMember, ...]

    def json(self) -> str:
        """Return it as text."""
        models: List[Dict[str, Any]] = [each._asdict() for each in self.models]
        return json.dumps({"share": self.sharing, "models": models}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GroupMembers:
        """Return what a text says that `json` has made.

        Raises:
            ValueError: it says something else.
        """
        try:
            parsed = json.loads(text)
            return cls(parsed["share"], tuple(GroupMember(**each) for each in parsed["models"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"expected model group arguments, got {text!r}: {error}") from None


def joint_digest(digests: Sequence[str]) -> str:
    """Return the digest of all models together, from that of each, in their order."""
    return hashlib.sha256("".join(f"{each}\n" for each in digests).encode("ascii")).hexdigest()


class RendezvousInfo(NamedTuple):
    """What a rank, or the broker of a group, is told.

    Attributes:
        rank: which one it is; that of a broker is -1.
        size: how many ranks there are.
        connect_timeout_s: seconds within which all have to find each other.
        exec_timeout_s: seconds for which a rank waits for another one in a predict.
        reply_rank: the rank whose outputs are the answer; None: those of all are joined.
        host: where the broker listens.
        port: likewise; 0 where there is no broker.
        rank_table: the path of the rank table, or "".
        group_info: the path of the groups of ranks within the model, or "".
        buffer_mib: of communication on a card, for each of those groups; 0 where there is no card.
        cores: on which it stays once it serves; "": on those that it has.
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
        """Whether this rank has an answer to give, or a part of one."""
        return self.reply_rank in (None, self.rank)

    def json(self) -> str:
        """Return it as text."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RendezvousInfo:
        """Return what a text says that `json` has made.

        Raises:
            ValueError: it says something else.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"expected rendezvous arguments, got {text!r}: {error}") from None
