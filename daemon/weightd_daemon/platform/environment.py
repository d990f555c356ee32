"""The environment variables that the daemon keeps, and so gives to its children."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

_WILDCARD = "*"

# A name, or the begin of names with * behind. What a service manager, the interpreter, the C library, the engines and
# the libraries of their cards read.
DEFAULT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("RUNTIME_DIRECTORY", "CACHE_DIRECTORY", "STATE_DIRECTORY", "CONFIGURATION_DIRECTORY", "JOURNAL_STREAM"),
    *("PYTHON*", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*", "GLIBC_TUNABLES"),
    *("OMP_*", "GOMP_*", "KMP_*", "OPENBLAS_*", "MKL_*", "ORT_*", "ONNX*"),
    *("MS_*", "MINDSPORE_*", "GLOG_*", "GLOO_*", "ASCEND*", "ACL_*", "GE_*", "HCCL_*", "TBE_*", "TE_*", "NPU_*"),
    *("ATB_*", "ASDOPS_*", "DEVICE_ID", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "TOOLCHAIN_HOME"),
)


def remove_unlisted(environment: MutableMapping[str, str], extra_names: Sequence[str] = ()) -> None:
    """Remove each variable that is neither in `DEFAULT_VARIABLES` nor in `extra_names`: children inherit what is left.

    An environment often has what is not for the code of models, such as passwords in the URL of a proxy.

    Args:
        environment: of this process.
        extra_names: names, or begins of names with * behind, of `pass_environment`.
    """
    patterns = (*DEFAULT_VARIABLES, *extra_names)
    names = {each for each in patterns if not each.endswith(_WILDCARD)}
    prefixes = tuple(each[: -len(_WILDCARD)] for each in patterns if each.endswith(_WILDCARD))
    for name in [each for each in environment if each not in names and not each.startswith(prefixes)]:
        del environment[name]
