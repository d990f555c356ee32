"""Fake engine whose model is a Python function."""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Dict, List, Optional, Sequence

import numpy as np

from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits
from weightd_worker.engines.engine import Arrays, Engine, Gears, ModelSignature, SharedWeights, WeightSharing

Answer = Callable[[Arrays], Arrays]


class FakeEngine(Engine, WeightSharing):
    """An engine that records its calls in `done`. A step with an entry in `fails` raises that exception."""

    name: ClassVar[str] = "fake"
    traits = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)

    def __init__(self, answer: Answer, signature: ModelSignature, gears: Gears = ()) -> None:
        self.sharing = self
        self.answer = answer
        self.fails: Dict[str, Exception] = {}
        self.done: List[str] = []
        self.received_inputs: List[Arrays] = []
        self._signature = signature
        self._gears = gears

    def versions(self) -> Dict[str, str]:
        return {"fake": "1.2"}

    def current_pid(self) -> str:
        return "4711"

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        self._do("build", f"{model} {','.join(pids)} {handle}")

    def export(self, store: str) -> SharedWeights:
        self._do("export", store)
        return SharedWeights("7", 1000, "half of it")

    def attach(self, handle: str) -> SharedWeights:
        self._do("attach", handle)
        return SharedWeights(handle, 900, "less")

    def trim_store(self, handle: str) -> None:
        self._do("settle", handle)

    def allow(self, pids: Sequence[str]) -> None:
        self._do("allow", ",".join(pids))

    def update_weights(self, weights: Arrays) -> None:
        self._do("update", ",".join(weights))

    def release_cached_memory(self) -> None:
        self.done.append("give back")

    def discard_model(self) -> None:
        self.done.append("discard")

    def memory(self) -> Optional[DeviceMemory]:
        return DeviceMemory(100, 40)

    @property
    def signature(self) -> ModelSignature:
        return self._signature

    @property
    def gears(self) -> Gears:
        return self._gears

    def predict(self, inputs: Arrays) -> Arrays:
        self.done.append("predict")
        self.received_inputs.append(inputs)
        # Engines do not warn of NaN and infinity, but numpy does by default.
        with np.errstate(all="ignore"):
            return self.answer(inputs)

    def _do(self, step: str, what: str) -> None:
        self.done.append(f"{step} {what}".rstrip())
        if step in self.fails:
            raise self.fails[step]


def sequence(*answers: Any) -> Answer:
    """Return a model that returns or raises these answers one after another."""
    left = list(answers)

    def answer(_: Arrays) -> Arrays:
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return {"y": now}

    return answer
