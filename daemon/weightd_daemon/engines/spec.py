"""What weightd knows of an engine: what it runs, where, and what can be said of its models before it is imported."""

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
    """The keys that a model has for its engine alone, each with a default. Most engines need none."""

    def resolve_paths(self: _Options, base: Path) -> _Options:
        """Return the options with paths that are absolute; `base` is what they are relative to."""
        del base
        return self

    def problems(self, devices: Sequence[str], sharing: str) -> Iterator[FieldError]:
        """Yield what does not go together, without a look at any file; the paths begin with the key.

        Args:
            devices: that the model runs on.
            sharing: "on" where the weights have to be shared; otherwise what prevents it is allowed.
        """
        del devices, sharing
        return iter(())

    def file_problems(self) -> Iterator[FieldError]:
        """Look at the files that the options name, of a secret not at its content, and yield what is wrong."""
        return iter(())

    def to_json(self) -> str:
        """Return what differs from the defaults, as a worker takes it; of files, only their paths."""
        default = type(self)()
        non_defaults = {key: value for key, value in plain(self).items() if getattr(self, key) != getattr(default, key)}
        return json.dumps(non_defaults, sort_keys=True)


def _no_problems(file: BinaryIO) -> list[str]:
    del file
    return []


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Attributes:
        name: in the configuration, and for a worker.
        suffix: of its model files.
        options: the class of its own keys; the table in the configuration is called as the engine.
        can_run_on_cards: whether it runs on cards, too; on the CPU each engine does.
        is_ranks_only: it runs nothing but the ranks of a model, [models.NAME.ranks].
        has_broker: its ranks find each other by a process of its own.
        build_factor: how many times the bytes of a model's files a process takes at most while it builds on the CPU.
        template_threads: with at most so many threads a predict, a process that has built a model has one thread and no
            other: so others may be forked of it.
        find_problems: says of an open model file why requests for it could not be answered, a line each. What only the
            library can tell is left to it. Raises OSError where the file cannot be read.
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
        """Return whether models of this engine can be on a device of that name."""
        return self.can_run_on_cards or is_cpu(device)
