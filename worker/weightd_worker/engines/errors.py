"""What an engine, or the sharing of its weights, can refuse."""

from __future__ import annotations

from weightd_protocol.errors import Internal, InvalidArgument, WeightdError


class EngineMissing(WeightdError):
    """The engine cannot be used in this interpreter; the text says what to install."""


class BuildError(WeightdError):
    """The engine cannot build the model; the text is the cause."""


class OutOfDeviceMemory(BuildError):
    """The card has no memory, or no place for this process; that may be over soon."""


class AttachRefused(WeightdError):
    """No further process can be let in; the text says why."""


class NotRun(InvalidArgument):
    """The engine refuses a request before the model has seen it: the model cannot have changed."""


class ModelCorrupted(Internal):
    """A predict failed in a way that may have spoilt the model: no further answer of it can be trusted."""


class MaybeCorrupted(ModelCorrupted):
    """Another predict spoilt the model while this one ran: its answer may be wrong, and it is not to blame."""
