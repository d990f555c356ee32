"""The state file, which describes the models and processes of a daemon for the next daemon of the same service.

A shim keeps the processes alive between the two daemons. The state file is in the private directory, and is replaced
after each change of a generation. The next daemon compares it with the children of the shim: a process that is in the
file but is not a child of the shim has exited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd_daemon.models.persisted import DeviceRecord, ModelRecord, RolloutRecord
from weightd_protocol import limits
from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.worker import CHILD_PROTOCOL_VERSION
from weightd_protocol.schema import FieldError, decode, integer, list_of, plain, record, text
from weightd_protocol.version import VERSION

_log = logging.getLogger("weightd")

_COUNT = integer(0, limits.MAX_COUNT)


class HandoverError(WeightdError):
    """The state file cannot be used; the error text gives the reason."""


@dataclass(frozen=True)
class Handover:
    """The content of the state file.

    Attributes:
        version: the version of the daemon that wrote the file.
        protocol: the version of the protocol between the daemon and its children.
        models: the models with their generations and children.
        devices: the devices with the memory that their cards reported.
        rollouts: the rollouts in progress.
    """

    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    protocol: int = field(metadata=_COUNT)
    models: tuple[ModelRecord, ...] = field(metadata=list_of(record(ModelRecord), limits.MAX_MODELS))
    devices: tuple[DeviceRecord, ...] = field(metadata=list_of(record(DeviceRecord), limits.MAX_DEVICES))
    rollouts: tuple[RolloutRecord, ...] = field(default=(), metadata=list_of(record(RolloutRecord), limits.MAX_MODELS))


def write(
    path: Path,
    models: Sequence[ModelRecord],
    devices: Sequence[DeviceRecord],
    rollouts: Sequence[RolloutRecord] = (),
) -> None:
    """Replace the state file. If this fails, remove the old file, so that the next daemon loads every model again."""
    new = path.with_suffix(".new")
    try:
        content = Handover(VERSION, CHILD_PROTOCOL_VERSION, tuple(models), tuple(devices), tuple(rollouts))
        new.write_text(json.dumps(plain(content)), "utf-8")
        new.replace(path)
    except (OSError, FieldError) as error:
        _log.warning("the next daemon will have to load every model: %s: %s", path, error)
        for each in (new, path):
            with contextlib.suppress(OSError):
                each.unlink(missing_ok=True)


def read(path: Path) -> Handover:
    """Return the content of the state file that the previous daemon has left.

    Raises:
        HandoverError: the file is missing or invalid, or the children use another version of the protocol.
    """
    try:
        values: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HandoverError(f"{path}: {os.strerror(error.errno or 0)}") from None
    except (ValueError, RecursionError) as error:
        raise HandoverError(f"{path}: not JSON: {error}") from None
    try:
        _check_protocol(values)
        found = decode(Handover, values)
        for index, model in enumerate(found.models):
            _check_sources(model, f".models[{index}]")
        return found
    except FieldError as error:
        raise HandoverError(f"{path}: {error}") from None


def _check_protocol(values: Any) -> None:
    """Raise HandoverError unless the children use the protocol version of this daemon.

    Called before the other fields are decoded, because another version of weightd may have written other fields.
    """
    fields = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
    if fields.get("protocol") != CHILD_PROTOCOL_VERSION:
        theirs, ours = (
            f"weightd {fields.get('version')} uses protocol {fields.get('protocol')}",
            f"{VERSION} {CHILD_PROTOCOL_VERSION}",
        )
        raise HandoverError(f"{theirs} with its workers, {ours}")


def _check_sources(model: ModelRecord, path: str) -> None:
    known_numbers = {each.number for each in model.sources}
    for what, number in [
        ("source", model.source),
        *(("generations.source", each.source) for each in model.generations),
    ]:
        if number not in known_numbers:
            raise FieldError(f"expected the number of one of its sources, got {number}").at(f"{path}.{what}")
    if len(model.last_ids) != 2:
        raise FieldError(f"expected two numbers, got {len(model.last_ids)}").at(f"{path}.last_ids")
