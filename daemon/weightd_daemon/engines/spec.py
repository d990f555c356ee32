"""The specification of an engine: the models and devices that it supports, and the checks that need no import of it."""

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
    """The keys of a model for its engine alone, each with a default. Most engines have none."""

    def resolve_paths(self: _Options, base: Path) -> _Options:
        """Return the options with absolute paths; `base` is the directory of relative ones."""
        del base
        return self

    def problems(self, devices: Sequence[str], sharing: str) -> Iterator[FieldError]:
        """Yield the conflicts among the options, without reading files; the path of each error begins with the key.

        Args:
            devices: the devices on which the model runs.
            sharing: "on" if the weights must be shared; otherwise options that prevent sharing are allowed.
        """
        del devices, sharing
        return iter(())

    def file_problems(self) -> Iterator[FieldError]:
        """Yield the problems of the files that the options name; the content of secret files is not read."""
        return iter(())

    def to_json(self) -> str:
        """Return the options that differ from their defaults, as a worker expects them. Files are given by path."""
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
        name: the name in the configuration and for workers.
        suffix: the suffix of its model files.
        options: the class of its options; the table in the configuration has the name of the engine.
        can_run_on_cards: whether it runs on cards; every engine runs on the CPU.
        is_ranks_only: whether it runs only the ranks of a model, [models.NAME.ranks].
        has_broker: whether its ranks find each other through a broker process.
        build_factor: the most memory that a process takes while it builds on the CPU, as a multiple of the bytes of the
            model's files.
        template_threads: the most threads of a predict for which a process that has built a model has only one thread,
            so that workers may be forked from it; 0 for an engine without templates.
        find_problems: returns why requests for a model file cannot be answered, one line for each problem, as far as
            that is known without the library. Raises OSError if the file cannot be read.
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
        """Return whether models of this engine can run on the device of that name."""
        return self.can_run_on_cards or is_cpu(device)
