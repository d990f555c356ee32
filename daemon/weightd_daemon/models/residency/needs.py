"""The memory that models need: measured at their last load, or estimated from their files before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightd_daemon.models.placement import DeviceBudget, ResourceRequest
from weightd_daemon.models.residency.reservations import HOST, Reservation, Reservations
from weightd_daemon.platform.memory import MIB
from weightd_protocol import limits
from weightd_protocol.schema import integer, text

# The memory of a process on the CPU beside the weights, before it has been measured: 5 to 12 MiB were measured for a
# forked worker with ONNX Runtime.
_PROCESS_BYTES = 12 * MIB

# When a loaded model is measured first and again, and how often a measurement in progress is asked for.
_FIRST_DELAY_S = 1.0
_INTERVAL_S = 60.0
_POLL_INTERVAL_S = 0.1

# How many models are remembered; removed models count, too.
_MAX_NEEDS = 2 * limits.MAX_MODELS


@dataclass(frozen=True)
class NeedRecord:
    """The measured memory of a model on the CPU, for the next daemon.

    Attributes:
        model: the name of the model.
        file_bytes: the size of the files that were loaded; the record holds only for files of this size.
        nbytes: the memory of all processes.
    """

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    file_bytes: int = field(metadata=integer(0, limits.MAX_COUNT))
    nbytes: int = field(metadata=integer(0, limits.MAX_COUNT))

    @property
    def key(self) -> str:
        """The name of the model."""
        return self.model


class MeasuredNeeds:
    """The measured memory of models, the most recently measured last."""

    def __init__(self) -> None:
        self._by_model: dict[str, NeedRecord] = {}

    def find(self, model: str) -> NeedRecord | None:
        """Return the memory that a model was measured to take; None if it was never measured."""
        return self._by_model.get(model)

    def remember(self, record: NeedRecord) -> None:
        """Record a measurement."""
        self._by_model.pop(record.model, None)
        self._by_model[record.model] = record
        while len(self._by_model) > _MAX_NEEDS:
            del self._by_model[next(iter(self._by_model))]

    def records(self) -> Iterator[NeedRecord]:
        """Yield the measurements for the counter store."""
        yield from list(self._by_model.values())

    def restore(self, records: Sequence[NeedRecord]) -> None:
        """Add the measurements of an earlier daemon."""
        for each in records:
            self.remember(each)


class NeedMeter:
    """Measures loaded generations on the CPU.

    Args:
        measure: starts to measure the memory of a model and returns it once it is known, until then None.

    Attributes:
        needs: the results.
    """

    def __init__(self, measure: Callable[[str], int | None]) -> None:
        self.needs = MeasuredNeeds()
        self._measure = measure
        self._file_bytes: dict[str, int] = {}
        # When each generation is measured next.
        self._due_at: dict[str, float] = {}

    def set_file_bytes(self, label: str, nbytes: int) -> None:
        """Record the size of the files that a generation loads."""
        self._file_bytes[label] = nbytes

    def on_serving(self, label: str, now: float) -> bool:
        """Record that a generation serves; return whether this is new."""
        is_new = label not in self._due_at
        if is_new:
            self._due_at[label] = now + _FIRST_DELAY_S
        return is_new

    def forget(self, label: str) -> None:
        """Measure a generation no more, because its processes exit."""
        self._due_at.pop(label, None)
        self._file_bytes.pop(label, None)

    def run(self, reservations: Reservations, now: float) -> list[tuple[str, int]]:
        """Return the generations that were measured now, with their memory."""
        measured: list[tuple[str, int]] = []
        for label, due_at in list(self._due_at.items()):
            reservation = reservations.get(label)
            if now < due_at or reservation is None or HOST not in reservation.need:
                continue
            if sum(each.model == reservation.model for each in reservations) > 1:
                self._due_at[label] = now + _FIRST_DELAY_S
                continue  # the meter cannot tell an old generation from a new one
            nbytes = self._measure(reservation.model)
            self._due_at[label] = now + (_POLL_INTERVAL_S if nbytes is None else _INTERVAL_S)
            if nbytes is not None:
                self.needs.remember(NeedRecord(reservation.model, self._file_bytes.get(label, 0), nbytes))
                measured.append((label, nbytes))
        return measured

    @property
    def next_event_at(self) -> float:
        """When `run` is due, in monotonic seconds."""
        return min(self._due_at.values(), default=float("inf"))


def estimate_bytes(request: ResourceRequest) -> int:
    """Return the memory of a model on the CPU before it was ever measured, from the size of its files."""
    return request.copy_count * request.weight_bytes + request.process_count * _PROCESS_BYTES


def card_need_bytes(request: ResourceRequest, card: DeviceBudget | None, capacity_bytes: int | None) -> int:
    """Return the memory of a generation on a card.

    As long as the memory of its processes is neither configured nor observed, it is estimated from the other models on
    the card. Because of an estimate alone, no model is refused.
    """
    observed = [each.process_bytes for each in card.reserved.values() if each.process_bytes] if card else []
    if request.process_bytes or not observed:
        return request.total_bytes
    estimate = replace(request, process_bytes=min(observed)).total_bytes
    return max(request.total_bytes, estimate if capacity_bytes is None else min(estimate, capacity_bytes))


def observed_excess(
    reservations: Iterable[Reservation], devices: Mapping[str, DeviceBudget]
) -> Iterator[tuple[str, str, int]]:
    """Yield the label, the card and the observed memory of each generation that takes more than it has reserved."""
    for each in reservations:
        for pool, nbytes in each.need.items():
            request = devices[pool].reserved.get(each.label) if pool in devices else None
            if request is not None and request.total_bytes > nbytes:
                yield each.label, pool, request.total_bytes
