"""What a request says beside its tensors: parameters of the protocol, as values of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightd_gateway.error_codes import TooLarge
from weightd_gateway.grpc.handlers import RpcContext
from weightd_gateway.system_shared_memory import RegisteredRegions, ShmSlice
from weightd_protocol import limits
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument
from weightd_protocol.schema import describe_value

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"

# Of a request, or of one of its tensors: clients send a few.
MAX_PARAMETERS = 64

# What only makes sense if requests know of each other. 0, false and "" are what clients send who want nothing.
_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


def parse_parameters(field: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each `InferParameter` in a field; None of one that has none.

    Raises:
        TooLarge: they are too many.
    """
    if len(parameters) > MAX_PARAMETERS:
        raise TooLarge(f"{field}: expected at most {MAX_PARAMETERS}, got {len(parameters)}")
    found: dict[str, Any] = {}
    for name, each in parameters.items():
        kind = each.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(each, kind)
    return found


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Look at the parameters of a request: those that nobody knows are let pass.

    Raises:
        InvalidArgument: one asks for what is not in weightd.
    """
    for name in _SEQUENCE_PARAMETERS:
        if parameters.get(name):
            raise InvalidArgument(f"parameters.{name}: weightd has no sequences of requests")


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """Return the seconds that a request says it may take; None: it does not.

    Raises:
        InvalidArgument: it says something else.
    """
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or not 0 <= timeout_us <= limits.MAX_TIMEOUT_US:
        raise InvalidArgument(
            f"parameters.timeout: expected integer, 0 to {limits.MAX_TIMEOUT_US}, in microseconds, got"
            f" {describe_value(timeout_us)}"
        )
    return timeout_us / 1e6 if timeout_us else None


def earlier_timeout(requested_s: float | None, time_left_s: float | None) -> float | None:
    """Return the seconds that a request may take, by what it says and by its call; None: as many as it takes.

    Raises:
        DeadlineExceeded: its call has none left.
    """
    if time_left_s is None:
        return requested_s
    if time_left_s <= 0.0:
        raise DeadlineExceeded("the deadline of the call has passed")
    return min(time_left_s, limits.MAX_TIMEOUT_US / 1e6 if requested_s is None else requested_s)


def priority_of(parameters: Mapping[str, Any]) -> int | None:
    """Return the priority of a request; None: the model's default.

    Raises:
        InvalidArgument: it is none.
    """
    priority = parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"parameters.priority: expected integer, 0 to {limits.MAX_PRIORITY}, got {describe_value(priority)}"
        )
    return priority or None


def shm_slice_of(parameters: Mapping[str, Any], call: RpcContext, regions: RegisteredRegions) -> ShmSlice:
    """Return where a tensor is, by its parameters.

    Raises:
        InvalidArgument: the caller may have none there, or it is not within the region.
        NotFound: the caller has no such region.
    """
    check_local(call)
    return regions.resolve(call.caller, parameters[REGION], parameters.get(OFFSET, 0), parameters.get(SIZE))


def check_local(call: RpcContext) -> None:
    """Look at where a caller is who speaks of shared memory.

    Raises:
        InvalidArgument: not on this host.
    """
    if not call.is_local:
        raise InvalidArgument("shared memory is for callers on the host of the gateway")
