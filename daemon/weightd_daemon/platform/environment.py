"""Environment variables that the daemon keeps and passes to its children."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

_WILDCARD = "*"

# Variables that the daemon always keeps, for service managers, Python, the C library, the engines and the libraries for
# Ascend cards. Each entry is a name, or the prefix of names followed by *.
DEFAULT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("RUNTIME_DIRECTORY", "CACHE_DIRECTORY", "STATE_DIRECTORY", "CONFIGURATION_DIRECTORY", "JOURNAL_STREAM"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES"),
    *("OMP_*", "GOMP_*", "KMP_*", "OPENBLAS_*", "MKL_*", "ORT_*", "ONNX*"),
    *("MS_*", "MINDSPORE_*", "GLOG_*", "GLOO_*", "ASCEND*", "ACL_*", "GE_*", "HCCL_*", "TBE_*", "TE_*", "NPU_*"),
    *("ATB_*", "ASDOPS_*", "DEVICE_ID", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "TOOLCHAIN_HOME"),
)


def remove_unlisted(environment: MutableMapping[str, str], extra_names: Sequence[str] = ()) -> None:
    """Remove all environment variables except those in `DEFAULT_VARIABLES` and `extra_names`.

    The child processes inherit the remaining variables. An environment often contains secrets, such as a password in
    the URL of an HTTP proxy, which the code of models should not get.

    Args:
        environment: the environment of this process.
        extra_names: the configured value of `pass_environment`: names, or prefixes of names followed by *.
    """
    patterns = (*DEFAULT_VARIABLES, *extra_names)
    names = {each for each in patterns if not each.endswith(_WILDCARD)}
    prefixes = tuple(each[: -len(_WILDCARD)] for each in patterns if each.endswith(_WILDCARD))
    for name in [each for each in environment if each not in names and not each.startswith(prefixes)]:
        del environment[name]
