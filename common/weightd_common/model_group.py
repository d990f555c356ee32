"""What the process of a group of models is told on its command line, as JSON: which models it serves."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple


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
