"""The specification of an engine: the models and devices that it supports, and checks without importing the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from weightd_common.devices import is_cpu
from weightd_protocol.schema import FieldError, plain

_Options = TypeVar("_Options", bound="EngineOptions")


@dataclass(frozen=True)
class EngineOptions:
    """The keys of a model that only its engine uses, each with a default. Most engines have no such keys."""

    def resolve_paths(self: _Options, base: Path) -> _Options:
        """Return the options with absolute paths; relative paths are relative to `base`."""
        del base
        return self

    def problems(self, devices: Sequence[str], sharing: str) -> Iterator[FieldError]:
        """Yield an error for each conflict of options, without reading files; the error's path begins with the key.

        Args:
            devices: the devices on which the model runs.
            sharing: the model's key `sharing`. "on" forbids options that prevent sharing; other values allow them.
        """
        del devices, sharing
        return iter(())

    def file_problems(self) -> Iterator[FieldError]:
        """Yield the errors in the files that the options name, without reading the content of secret files."""
        return iter(())

    def to_json(self) -> str:
        """Return a JSON text for a worker: the options that differ from their defaults, with the paths of files."""
        default = type(self)()
        non_defaults = {key: value for key, value in plain(self).items() if getattr(self, key) != getattr(default, key)}
        return json.dumps(non_defaults, sort_keys=True)


def _no_problems(file: BinaryIO) -> list[str]:
    del file
    return []


@dataclass(frozen=True)
class EngineSpec:
    """The specification of one engine.

    Attributes:
        name: the name of the engine in the configuration and on the command line of workers.
        suffix: the suffix of the engine's model files.
        options: the class of the engine's options; their table in the configuration has the name of the engine.
        can_run_on_cards: whether the engine runs on cards; every engine runs on the CPU.
        is_ranks_only: whether the engine runs only models with ranks, [models.NAME.ranks].
        has_broker: whether ranks of the engine find each other through a broker process.
        build_factor: the maximum memory of a process while it builds a model on the CPU, divided by the size of the
            model's files.
        template_threads: the largest value of the model's key `threads` with which a holder has only one thread after
            its build. Only then can workers be forked from the holder. 0 for an engine without templates.
        find_problems: checks a model file without the engine's library; returns a line for each reason why requests for
            the model would fail. Raises OSError if the file cannot be read.
    """

    name: str
    suffix: str
    options: type[EngineOptions] = EngineOptions
    can_run_on_cards: bool = False
    is_ranks_only: bool = False
    has_broker: bool = False
    build_factor: float = 1.0
    template_threads: int = 0
    find_problems: Callable[[BinaryIO], list[str]] = _no_problems

    def can_run_on(self, device: str) -> bool:
        """Return whether models of this engine can run on a device."""
        return self.can_run_on_cards or is_cpu(device)
