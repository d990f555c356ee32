"""The memory that models need: measured after their last load, or estimated from their files before the first load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightd_daemon.models.placement import DeviceBudget, ResourceRequest
from weightd_daemon.models.residency.reservations import HOST, Reservation, Reservations
from weightd_daemon.platform.memory import MIB
from weightd_protocol import limits
from weightd_protocol.schema import integer, text

# The assumed bytes of a process on the CPU besides the weights, for a model that was never measured. A forked worker
# with ONNX Runtime takes 5 to 12 MiB.
_PROCESS_BYTES = 12 * MIB

# Seconds from the load of a model to its first measurement, from one measurement to the next, and between two checks
# whether a measurement is complete.
_FIRST_DELAY_S = 1.0
_INTERVAL_S = 60.0
_POLL_INTERVAL_S = 0.1

# Maximum number of models whose measured memory is kept, including removed models.
_MAX_NEEDS = 2 * limits.MAX_MODELS


@dataclass(frozen=True)
class NeedRecord:
    """The measured memory of a model on the CPU, for the next daemon.

    Attributes:
        model: the name of the model.
        file_bytes: the size of the files that were loaded; the record is not used for files of another size.
        nbytes: the measured memory of all processes of the model, in bytes.
    """

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    file_bytes: int = field(metadata=integer(0, limits.MAX_COUNT))
    nbytes: int = field(metadata=integer(0, limits.MAX_COUNT))

    @property
    def key(self) -> str:
        """The name of the model, which identifies the record."""
        return self.model


class MeasuredNeeds:
    """The last measured memory of each model, in the order of the measurements."""

    def __init__(self) -> None:
        self._by_model: dict[str, NeedRecord] = {}

    def find(self, model: str) -> NeedRecord | None:
        """Return the last measurement of a model; None if the model was never measured."""
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
    """Measures the memory of loaded generations on the CPU at regular intervals.

    Args:
        measure: returns the measured memory of a model in bytes, or None until the measurement is complete; the first
            call starts the measurement.

    Attributes:
        needs: the last measured memory of each model.
    """

    def __init__(self, measure: Callable[[str], int | None]) -> None:
        self.needs = MeasuredNeeds()
        self._measure = measure
        self._file_bytes: dict[str, int] = {}
        # The time of the next measurement of each generation, by its label, in monotonic seconds.
        self._due_at: dict[str, float] = {}

    def set_file_bytes(self, label: str, nbytes: int) -> None:
        """Record the size of the files that a generation loads."""
        self._file_bytes[label] = nbytes

    def on_serving(self, label: str, now: float) -> bool:
        """Record that a generation serves; return True at the first call for this generation."""
        is_new = label not in self._due_at
        if is_new:
            self._due_at[label] = now + _FIRST_DELAY_S
        return is_new

    def forget(self, label: str) -> None:
        """Stop measuring a generation, because its processes have exited."""
        self._due_at.pop(label, None)
        self._file_bytes.pop(label, None)

    def run(self, reservations: Reservations, now: float) -> list[tuple[str, int]]:
        """Measure the generations that are due; return the label and the bytes of each completed measurement."""
        measured: list[tuple[str, int]] = []
        for label, due_at in list(self._due_at.items()):
            reservation = reservations.get(label)
            if now < due_at or reservation is None or HOST not in reservation.need:
                continue
            if sum(each.model == reservation.model for each in reservations) > 1:
                self._due_at[label] = now + _FIRST_DELAY_S
                continue  # `measure` would return the memory of all generations together
            nbytes = self._measure(reservation.model)
            self._due_at[label] = now + (_POLL_INTERVAL_S if nbytes is None else _INTERVAL_S)
            if nbytes is not None:
                self.needs.remember(NeedRecord(reservation.model, self._file_bytes.get(label, 0), nbytes))
                measured.append((label, nbytes))
        return measured

    @property
    def next_event_at(self) -> float:
        """The time at which `run` is due, in monotonic seconds."""
        return min(self._due_at.values(), default=float("inf"))


def estimate_bytes(request: ResourceRequest) -> int:
    """Return the memory in bytes of a model on the CPU that was never measured, estimated from its files."""
    return request.copy_count * request.weight_bytes + request.process_count * _PROCESS_BYTES


def card_need_bytes(request: ResourceRequest, card: DeviceBudget | None, capacity_bytes: int | None) -> int:
    """Return the memory in bytes that a generation needs on a card.

    If the memory of a process besides the weights is neither configured nor measured, the smallest value that other
    models on the card have is used. The estimate is limited to `capacity_bytes`, so that no model is refused because of
    an estimate alone.
    """
    observed = [each.process_bytes for each in card.reserved.values() if each.process_bytes] if card else []
    if request.process_bytes or not observed:
        return request.total_bytes
    estimate = replace(request, process_bytes=min(observed)).total_bytes
    return max(request.total_bytes, estimate if capacity_bytes is None else min(estimate, capacity_bytes))


def observed_excess(
    reservations: Iterable[Reservation], devices: Mapping[str, DeviceBudget]
) -> Iterator[tuple[str, str, int]]:
    """Yield the label, the card and the measured bytes of each generation that takes more than it has reserved."""
    for each in reservations:
        for pool, nbytes in each.need.items():
            request = devices[pool].reserved.get(each.label) if pool in devices else None
            if request is not None and request.total_bytes > nbytes:
                yield each.label, pool, request.total_bytes
