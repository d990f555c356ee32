"""Rank engine for MindSpore Lite with the graph engine (the provider "ge") on an Ascend card.

Limits of the library, from the sources of MindSpore Lite 2.7 and HCCL, and how this module handles them:

- The library joins the group during the build, without contacting other ranks, and connects to them in the first
  predict. So `join_group` does nothing. Environment variables set the time limits for connecting and for waiting within
  a predict. HCCL reads the variables once, so this module sets them before the import.
- If the key for the rank table is missing or misspelt, the build succeeds, but the first predict fails. So this module
  passes the key in the arguments of the build, which override the options in a file. Versions before 2.7 ignore the
  rank's number, so they are rejected.
- The options of the first model of a process apply to all its models. So a process has only one model.
- The library reads a MindIR that MindSpore has exported, and names the outputs differently in each rank. So this
  module takes the names and the order of tensors from the file, and their datatypes and shapes from the built model.
- The library cannot share weights.
- The library waits for other ranks without a time limit, so the daemon's time limit must end a predict that hangs. The
  library does not hold the GIL during a predict, so other threads can run.
- A failed predict corrupts the results of the other ranks, so it raises `ModelCorrupted`. A failed resize sends nothing
  to other ranks, so it raises `RankRejected`.
"""

from __future__ import annotations

import dataclasses
import os
import types
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from weightd_common.devices import card_of
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import (
    Arrays,
    BuildError,
    BuildSettings,
    EngineMissing,
    ModelCorrupted,
    ModelSignature,
    OutOfDeviceMemory,
)
from weightd_worker.engines.mindspore import read_signature
from weightd_worker.engines.mindspore_lite.ascend import OUT_OF_MEMORY_MARKS, MindSporeLiteAscend
from weightd_worker.engines.ranks import RankEngine, RankRejected, RankRendezvous

_TOO_OLD = "mindspore_lite {} does not support ranks; install 2.7 or later"


class MindSporeLiteRank(RankEngine):
    """Rank engine that runs one slice on a card. A process can have only one such engine."""

    name = "mindspore_lite"

    def __init__(self, rendezvous: RankRendezvous) -> None:
        super().__init__(rendezvous)
        if card_of(rendezvous.device) is None:
            raise BuildError(
                f"device: ranks of mindspore_lite run on cards, expected ascend:N, got {rendezvous.device!r}"
            )
        if not rendezvous.rank_table:
            raise BuildError("ranks.table: expected the path of a rank table, got none")
        os.environ["HCCL_CONNECT_TIMEOUT"] = str(rendezvous.connect_timeout_s)
        os.environ["HCCL_EXEC_TIMEOUT"] = str(rendezvous.exec_timeout_s)
        if rendezvous.buffer_mib:
            os.environ["HCCL_BUFFSIZE"] = str(rendezvous.buffer_mib)
        self._slice = _Slice(rendezvous, {})

    def versions(self) -> Mapping[str, str]:
        """Return the library's version."""
        return self._slice.versions()

    def join_group(self) -> None:
        """Do nothing: the library connects the ranks in their first predict."""

    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        """Build the slice."""
        self._slice = _Slice(self._rendezvous, options)
        self._slice.build(path)
        return self._slice.signature

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the slice together with the other ranks, and copy the outputs."""
        try:
            return self._slice.predict(inputs)
        except InvalidArgument as error:
            raise RankRejected(str(error)) from None
        except ModelCorrupted as error:
            # Lack of memory shows only here, because the library allocates the card's memory in the first predict.
            if any(each in str(error) for each in OUT_OF_MEMORY_MARKS):
                raise OutOfDeviceMemory(str(error)) from None
            raise

    def leave_group(self) -> None:
        """Do nothing: this engine has no broker to notify."""

    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card as the driver reports it; None if the query fails."""
        return self._slice.memory()


class _Slice(MindSporeLiteAscend):
    """The engine with which a rank builds and runs its slice.

    Raises:
        EngineMissing: the library does not support ranks.
        BuildError: an option is not valid.
    """

    def __init__(self, rendezvous: RankRendezvous, options: Mapping[str, Any]) -> None:
        super().__init__(
            BuildSettings(rendezvous.threads, rendezvous.device, False, options), card_of(rendezvous.device) or 0
        )
        self._rendezvous = rendezvous
        if "rank_id" not in dir(type(self._library.Context().ascend)):
            raise EngineMissing(_TOO_OLD.format(self._library.__version__))

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build the slice with private weights."""
        self._file_signature = read_signature(model)
        super().build(model, pids=pids, handle=handle)

    @property
    def signature(self) -> ModelSignature:
        """The signature of the built model, but with the names of inputs and outputs in the model's file."""
        file_signature, (inputs, outputs) = self._file_signature, super().signature
        return ModelSignature(
            _with_file_names(inputs, file_signature.inputs), _with_file_names(outputs, file_signature.outputs)
        )

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the slice, and return copies of the outputs under the names in the model's file."""
        outputs = super().predict(
            {name: inputs[each.name] for name, each in zip(self._names, self._file_signature.inputs)}
        )
        return {each.name: array for each, array in zip(self._file_signature.outputs, outputs.values())}

    def _context(self) -> Any:
        rendezvous, context = self._rendezvous, super()._context()
        context.ascend.provider = "ge"
        context.ascend.rank_id = rendezvous.rank
        if rendezvous.group_info:
            context.group_info_file = rendezvous.group_info
        return context

    def _ascend_section(self) -> Dict[str, str]:
        return {"rank_table_file": self._rendezvous.rank_table}


def _with_file_names(
    tensors: Sequence[TensorSignature], file_tensors: Sequence[TensorSignature]
) -> Tuple[TensorSignature, ...]:
    if len(tensors) != len(file_tensors):
        raise BuildError(f"expected {len(file_tensors)} tensors as the file has, got {len(tensors)} of the built model")
    return tuple(dataclasses.replace(built, name=each.name) for built, each in zip(tensors, file_tensors))
