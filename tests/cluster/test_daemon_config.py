"""The file that a replica writes for its daemon says what it was told, whatever that is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from weightd_daemon.config.load import load_text
from weightd_protocol.errors import InvalidArgument
from weightd_ray import daemon_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIMPLE = st.one_of(st.text(), st.integers(-(2**40), 2**40), st.booleans(), st.floats(-1e9, 1e9))
_VALUES = st.one_of(_SIMPLE, st.lists(_SIMPLE, max_size=3), st.dictionaries(st.text(min_size=1), _SIMPLE, max_size=2))


@settings(max_examples=examples(25))
@given(st.dictionaries(st.text(min_size=1), _VALUES, max_size=3))
def test_any_table_is_read_as_it_was_written(table: dict[str, object]) -> None:
    text = daemon_config.config_text(Path("/d"), {"m": table})
    assert tomllib.loads(text)["models"]["m"] == table


def test_all_that_a_daemon_has_is_in_its_directory() -> None:
    config = load_text(
        daemon_config.config_text(Path("/d/x"), {"m": {"path": "/a.onnx", "workers": 2}}), Path("/w.toml")
    )
    daemon = config.daemon
    assert f"unix://{daemon.unix_socket}" == daemon_config.client_address(Path("/d/x"))
    for each in (daemon.unix_socket, daemon.channel_socket, daemon.private_dir, daemon.counters_file):
        assert each.is_relative_to("/d/x")
    assert config.models["m"].workers == 2


def test_sockets_with_paths_too_long_are_refused_before_there_is_a_daemon() -> None:
    longest = Path("/" + "d" * (daemon_config.MAX_DIRECTORY_BYTES - 1))
    load_text(daemon_config.config_text(longest, {"m": {"path": "/a.onnx"}}), Path("/w.toml"))
    with pytest.raises(InvalidArgument, match=r"directory: .* at most 80 bytes, got 81"):
        daemon_config.config_text(Path(f"{longest}d"), {})
