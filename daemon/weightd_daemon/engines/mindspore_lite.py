"""MindSpore Lite: its specification, and the table of options [models.NAME.mindspore_lite] with the checks.

The library silently ignores settings that it cannot use. So this module rejects settings without an effect, and names
the reason.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightd_common.devices import has_cores, is_cpu
from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_common.toml_schema import user_path
from weightd_daemon.engines.spec import EngineOptions, EngineSpec
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, boolean, integer, list_of, mapping, one_of

_SHAPES = mapping(list_of(integer(1, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)
_PATH = user_path(limits.MAX_PATH_BYTES, empty=True)
_PRECISIONS = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")
_BIND_SLOW_CORES = 2
_DEC_MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")
_FILE_KEYS = ("config_file", "dec_key_file")

# Settings that are rejected in MindSpore Lite's configuration file: weightd decides which processes share weights.
_SHARING_KEYS = ("shareable_weight_pid_list", "shareable_weight_mem_handle")


@dataclass(frozen=True)
class MindSporeLiteOptions(EngineOptions):
    """The table [models.NAME.mindspore_lite]."""

    provider: str = field(default="", metadata=one_of(["", "ge"]))
    """On Ascend: "ge" runs the model with the graph engine, which cannot share weights. Default: ACL, which can."""

    precision_mode: str = field(default="", metadata=one_of(["", *_PRECISIONS]))
    """On Ascend: precision of the computation. Default: MindSpore Lite's default, enforce_fp16."""

    thread_affinity_mode: int = field(default=0, metadata=integer(0, 2))
    """On the CPU: 1 binds threads to the fast cores first, 2 to the slow cores first, 0 to none."""

    thread_affinity_cores: tuple[int, ...] = field(default=(), metadata=list_of(integer(0, 65535), 4096))
    """On the CPU: cores to which threads are bound. Empty: threads are not bound."""

    inter_op_parallel: int = field(default=0, metadata=integer(0, 1024))
    """On the CPU: number of operators that run in parallel. 0: MindSpore Lite's default."""

    parallel_workers: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    """On the CPU: number of predicts, each with the model's `threads`, that each process runs in parallel by MindSpore
    Lite's own parallel workers, which share the weights. MindSpore Lite allows at most five for each core."""

    max_shape: Mapping[str, tuple[int, ...]] | None = field(default=None, metadata=_SHAPES)
    """On the CPU: the largest shape of each input. Each process runs this shape first and keeps the memory for it;
    larger requests are rejected. Default: none; a process rebuilds the model for each request larger than all
    before."""

    config_file: str = field(default="", metadata=_PATH)
    """Configuration file of MindSpore Lite."""

    dec_key_file: str = field(default="", metadata=_PATH)
    """File whose bytes are the key of an encrypted model, readable only by weightd's user or root (mode 0600)."""

    dec_mode: str = field(default="AES-GCM", metadata=one_of(_DEC_MODES))
    """Cipher of an encrypted model."""

    variable_weights: bool = field(default=False, metadata=boolean())
    """On Ascend: whether the model was converted with variable weights. Processes cannot share such weights."""

    def resolve_paths(self, base: Path) -> MindSporeLiteOptions:
        """Return the options with absolute paths."""
        paths: dict[str, Any] = {key: str(base / path) for key in _FILE_KEYS if (path := getattr(self, key))}
        return dataclasses.replace(self, **paths) if paths else self

    def problems(self, devices: Sequence[str], sharing: str) -> Iterator[FieldError]:
        """Yield an error for each option that conflicts with another option or would have no effect."""
        on_cards = not all(map(is_cpu, devices))
        for key, reason in (
            *(_no_effect_on_cards(self) if on_cards else _no_effect_on_cpu(self)),
            *(_core_binding_problems(self) if any(map(has_cores, devices)) else ()),
            *_no_effect(self),
            *(_sharing_problems(self) if on_cards and sharing == "on" else ()),
        ):
            yield _field_error(key, reason)

    def file_problems(self) -> Iterator[FieldError]:
        """Yield the errors in the files that the options name, without reading the content of the key file."""
        for key in _FILE_KEYS:
            path: str = getattr(self, key)
            if path:
                try:
                    self._check_file(key, Path(path))
                except FieldError as error:
                    yield error
                except OSError as error:
                    yield _field_error(key, f"{path}: {error.strerror}")

    def _check_file(self, key: str, path: Path) -> None:
        # The path of the key file must not be a link, because the owner and mode of the link's target could differ.
        status = path.lstat() if key == "dec_key_file" else path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _field_error(key, f"{path}: expected a regular file")
        if key == "dec_key_file":
            _check_private(key, path, status)
        else:
            _check_config(key, path, self.provider)


# Measured with version 2.0.0, which holds several copies of the weights at the same time: a build of 192 MiB of
# matrices takes 6.0 times this size.
SPEC = EngineSpec(
    "mindspore_lite", suffix=".mindir", options=MindSporeLiteOptions, can_run_on_cards=True, build_factor=6.5
)

_Problem = tuple[str, str]


def _no_effect_on_cpu(options: MindSporeLiteOptions) -> Iterator[_Problem]:
    for key in ("provider", "precision_mode", "variable_weights"):
        if getattr(options, key):
            yield key, "has no effect on the CPU, only on a card"
    if options.parallel_workers > 1:
        if options.dec_key_file:
            yield "dec_key_file", "parallel workers cannot use a key; set parallel_workers = 1"
        if options.thread_affinity_mode == _BIND_SLOW_CORES:
            yield "thread_affinity_mode", "parallel workers are not bound to the slow cores; set 0 or 1"


def _no_effect_on_cards(options: MindSporeLiteOptions) -> Iterator[_Problem]:
    for key in ("thread_affinity_mode", "thread_affinity_cores", "inter_op_parallel", "max_shape"):
        if getattr(options, key):
            yield key, "has no effect on a card, only on the CPU"
    if options.parallel_workers > 1:
        yield "parallel_workers", "expected 1 on a card, where each parallel worker would load its own weights"


def _core_binding_problems(options: MindSporeLiteOptions) -> Iterator[_Problem]:
    for key in ("thread_affinity_mode", "thread_affinity_cores"):
        if getattr(options, key):
            yield key, "threads stay on the cores of the model's device in the table [devices]"


def _no_effect(options: MindSporeLiteOptions) -> Iterator[_Problem]:
    if options.thread_affinity_mode and options.thread_affinity_cores:
        yield "thread_affinity_mode", "has no effect beside thread_affinity_cores"
    if options.dec_mode != "AES-GCM" and not options.dec_key_file:
        yield "dec_mode", "has no effect without dec_key_file"


def _sharing_problems(options: MindSporeLiteOptions) -> Iterator[_Problem]:
    remedy = 'set sharing = "off"'
    if options.provider == "ge":
        yield (
            "provider",
            f'weights cannot be shared with the provider "ge": the provider does not export them; {remedy}',
        )
    if options.dec_key_file:
        yield (
            "dec_key_file",
            f"the weights of an encrypted model cannot be shared: MindSpore Lite does not export them; {remedy}",
        )
    if options.variable_weights:
        yield "variable_weights", f"variable weights cannot be shared: MindSpore Lite does not export them; {remedy}"


def _check_private(key: str, path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode not in (0o600, 0o400):
        raise _field_error(key, f"{path}: expected mode 0600 or 0400, got {mode:04o}")
    if status.st_uid not in (0, os.geteuid()):
        raise _field_error(key, f"{path}: expected a file of this user or root, got one of uid {status.st_uid}")
    if status.st_size == 0:
        raise _field_error(key, f"{path}: the file is empty")


def _check_config(key: str, path: Path, provider: str) -> None:
    for section, name, value in config_items(path):
        reason = ""
        if name in _SHARING_KEYS:
            reason = f"{name} is set by weightd; remove it from the file"
        elif section == "ascend_context" and name == "rank_table_file":
            reason = f"{name} makes the process a rank; remove it from the file, and use [models.NAME.ranks]"
        elif section == "ascend_context" and name == "provider" and value == "ge" != provider:
            reason = (
                'provider = ge selects the graph engine, which weightd has to know; set provider = "ge" beside this key'
            )
        if reason:
            raise _field_error(key, f"{path}: {reason}")


def config_items(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the section, name and value of each setting in a configuration file of MindSpore Lite.

    Raises:
        OSError: the file cannot be read.
    """
    section = ""
    for line in read_regular(path, MAX_CONFIG_BYTES).decode("utf-8", "replace").splitlines():
        text = line.strip()
        if text.startswith("[") and text.endswith("]"):
            section = text[1:-1].strip()
        elif "=" in text and not text.startswith("#"):
            name, _, value = text.partition("=")
            yield section, name.strip(), value.strip()


def _field_error(key: str, reason: str) -> FieldError:
    return FieldError(reason).at(f".{key}")
