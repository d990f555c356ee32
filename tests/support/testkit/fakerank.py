"""Fake engine of one rank whose slice of the model is a Python function."""

from __future__ import annotations

import types
from typing import Any, ClassVar, Dict, List, Mapping, Optional

from testkit.fakeengine import Answer
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, ModelSignature
from weightd_worker.engines.ranks import RankEngine, RankRendezvous

NOWHERE = RankRendezvous(0, 2, "cpu")


class FakeRank(RankEngine):
    """A rank engine that records its calls. A step with an entry in `fails` raises that exception."""

    name: ClassVar[str] = "fake"

    def __init__(self, answer: Answer, signature: ModelSignature) -> None:
        super().__init__(NOWHERE)
        self.answer = answer
        self.fails: Dict[str, Exception] = {}
        self.done: List[str] = []
        self.received_inputs: List[Arrays] = []
        self._signature = signature

    def versions(self) -> Mapping[str, str]:
        return {"fake": "1.2"}

    def join_group(self) -> None:
        self._do("enter")

    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        self._do("load", f"{path} {dict(options)}")
        return self._signature

    def leave_group(self) -> None:
        self._do("leave")

    def memory(self) -> Optional[DeviceMemory]:
        return DeviceMemory(100, 40)

    def predict(self, inputs: Arrays) -> Arrays:
        self._do("predict")
        self.received_inputs.append(inputs)
        return self.answer(inputs)

    def _do(self, step: str, what: str = "") -> None:
        self.done.append(f"{step} {what}".rstrip())
        if step in self.fails:
            raise self.fails[step]
