"""The options of MindSpore Lite, and what the library wants to be told for each."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional, Tuple

from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, boolean, decode, integer, list_of, mapping, one_of, text
from weightd_worker.engines.errors import BuildError

_MAX_SHAPE = mapping(list_of(integer(1, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)

_PATH = text(limits.MAX_PATH_BYTES, empty=True)
_PRECISIONS = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")

# Of every cipher; a longer file is no key.
_MAX_KEY_BYTES = 4096

# What decides who shares weights comes from the daemon alone.
_SHARING_KEYS = ("shareable_weight_pid_list", "shareable_weight_mem_handle")


@dataclass(frozen=True)
class Options:
    """As the daemon gives them; which go together is decided there (`weightd_daemon.engines.mindspore_lite`)."""

    provider: str = field(default="", metadata=one_of(["", "ge"]))
    precision_mode: str = field(default="", metadata=one_of(["", *_PRECISIONS]))
    thread_affinity_mode: int = field(default=0, metadata=integer(0, 2))
    thread_affinity_cores: Tuple[int, ...] = field(default=(), metadata=list_of(integer(0, 65535), 4096))
    inter_op_parallel: int = field(default=0, metadata=integer(0, 1024))
    parallel_workers: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    max_shape: Optional[Mapping[str, Tuple[int, ...]]] = field(default=None, metadata=_MAX_SHAPE)
    config_file: str = field(default="", metadata=_PATH)
    dec_key_file: str = field(default="", metadata=_PATH)
    dec_mode: str = field(default="AES-GCM", metadata=one_of(["AES-GCM", "AES-CBC", "SM4-CBC"]))
    variable_weights: bool = field(default=False, metadata=boolean())

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Options:
        """Return the options of a map.

        Raises:
            BuildError: it has something that is none; the text names the key.
        """
        try:
            return decode(cls, dict(options))
        except FieldError as error:
            raise BuildError(str(error.at(".options"))) from None

    def set_cpu(self, cpu: Any) -> None:
        """Set what concerns the threads. A misspelt attribute would be taken without a word."""
        # Only what was asked for: the library's own defaults are not all 0.
        if self.thread_affinity_mode:
            cpu.thread_affinity_mode = self.thread_affinity_mode
        if self.thread_affinity_cores:
            cpu.thread_affinity_core_list = list(self.thread_affinity_cores)
        if self.inter_op_parallel:
            cpu.inter_op_parallel_num = self.inter_op_parallel

    def set_ascend(self, ascend: Any) -> None:
        """Set what concerns a card."""
        if self.precision_mode:
            ascend.precision_mode = self.precision_mode
        if self.provider:
            ascend.provider = self.provider

    def build_arguments(self) -> Dict[str, Any]:
        """Return the arguments of `build_from_file` that these options need; no other, for 2.0 knows fewer.

        Raises:
            BuildError: a file is not what it has to be.
        """
        arguments: Dict[str, Any] = {}
        if self.config_file:
            _check_config(self.config_file)
            arguments["config_path"] = self.config_file
        if self.dec_key_file:
            arguments.update(dec_key=_read_key(self.dec_key_file), dec_mode=self.dec_mode)
        return arguments


def _check_config(path: str) -> None:
    """The library takes the sharing keys from this file too, and then refuses the build or shares with strangers."""
    try:
        lines = read_regular(path, MAX_CONFIG_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as error:
        raise BuildError(f"options.config_file: {path}: {_describe_error(error)}") from None
    for line in lines:
        key = line.partition("=")[0].strip()
        if key in _SHARING_KEYS:
            raise BuildError(f"options.config_file: {path}: {key} is set by weightd; remove it from the file")


def _read_key(path: str) -> bytes:
    """All bytes of the file are the key: its owner and mode are those of the very file that is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BuildError(f"options.dec_key_file: {path}: expected a regular file")
            if stat.S_IMODE(status.st_mode) not in (0o600, 0o400):
                mode = stat.S_IMODE(status.st_mode)
                raise BuildError(f"options.dec_key_file: {path}: expected mode 0600 or 0400, got {mode:04o}")
            if status.st_uid not in (0, os.geteuid()):
                raise BuildError(f"options.dec_key_file: {path}: expected a file of this user or root")
            key = file.read(_MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BuildError(f"options.dec_key_file: {path}: {_describe_error(error)}") from None
    if not 0 < len(key) <= _MAX_KEY_BYTES:
        raise BuildError(f"options.dec_key_file: {path}: expected a key of 1 to {_MAX_KEY_BYTES} bytes")
    return key


def _describe_error(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "the path holds a NUL"
