"""Tests of the gateway's configuration file: its contents, and errors that name their key."""

from __future__ import annotations

import hashlib
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from weightd_common.toml_schema import ErrorCollector
from weightd_gateway.auth import Caller, token_digest
from weightd_gateway.config.addresses import ListenAddress
from weightd_gateway.config.load import ConfigError, default_path, keys_needing_restart, load, parse
from weightd_gateway.config.schema import GatewayFile

_ME = pwd.getpwuid(os.geteuid()).pw_name


def parsed(content: dict[str, Any], base: Path = Path("/etc/weightd")) -> tuple[GatewayFile, list[str]]:
    problems = ErrorCollector()
    config = parse(content, base, problems)
    return config, [str(each) for each in problems.errors]


def test_empty_file_has_defaults() -> None:
    config, problems = parsed({})
    assert problems == []
    assert config.gateway.http_addresses == (ListenAddress(host="127.0.0.1", port=8000),)
    assert config.gateway.grpc_addresses == (ListenAddress(host="127.0.0.1", port=8001),)


def test_file_with_all_kinds_of_callers(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).touch()
    (tmp_path / "tokens").write_text(f"{hashlib.sha256(b'secret').hexdigest()} research alice\n", "utf-8")
    path = tmp_path / "gateway.toml"
    path.write_text(
        f"""
        [gateway]
        http = ["0.0.0.0:8000", "unix:/run/weightd-gateway/http.sock"]
        grpc = ["[::]:8001"]
        tls_cert = "cert.pem"
        tls_key = "key.pem"
        client_ca = "ca.pem"
        tokens = "tokens"
        anonymous = "guests"
        [certificates]
        shop = "sales"
        [users]
        {_ME} = "-"
        """,
        "utf-8",
    )
    config, identities = load(path)
    assert config.gateway.tls_cert == str(tmp_path / "cert.pem")
    assert identities.tokens == {token_digest("secret"): Caller("research", "alice")}
    assert identities.certificates == {"shop": Caller("sales", "certificate shop")}
    assert identities.users == {os.geteuid(): Caller(None, f"uid {os.geteuid()}")}
    assert identities.anonymous == Caller("guests", "anonymous")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"gatway": {}}, "gatway: unknown table; did you mean gateway?"),
        ({"gateway": {"htp": []}}, "gateway.htp: unknown key; did you mean http?"),
        ({"gateway": {"http": ["localhost"]}}, "gateway.http[0]: expected HOST:PORT"),
        ({"gateway": {"grpc": ["127.0.0.1:8001", "h:70000"]}}, "gateway.grpc[1]: expected HOST:PORT"),
        ({"gateway": {"http": ["unix:relative"]}}, "gateway.http[0]: expected HOST:PORT"),
        ({"gateway": {"http": [f"unix:/{'x' * 107}"]}}, "gateway.http[0]: expected a path of at most 107 bytes"),
        ({"gateway": {"http": [], "grpc": []}}, "gateway.http: expected at least one address in http or grpc"),
        (
            {"gateway": {"http": ["0.0.0.0:8000"]}},
            "gateway.http[0]: 0.0.0.0:8000: requests from other hosts would be sent without TLS",
        ),
        (
            {"gateway": {"grpc": ["example.org:8001"]}},
            "gateway.grpc[0]: example.org:8001: requests from other hosts would be sent without TLS",
        ),
        ({"gateway": {"tls_cert": "/dev/null"}}, "gateway.tls_key: missing"),
        ({"gateway": {"client_ca": "/dev/null"}}, "gateway.client_ca: has no effect without tls_cert"),
        (
            {"gateway": {"tls_cert": "/dev/null", "tls_key": "/nowhere"}},
            "gateway.tls_key: expected a file that the gateway's user may read, got '/nowhere'",
        ),
        ({"gateway": {"tokens": "~/tokens"}}, "gateway.tokens: expected a path without ~"),
        ({"gateway": {"max_body_bytes": 0}}, "gateway.max_body_bytes: expected integer"),
        ({"gateway": {"max_memory_bytes": 1024}}, "gateway.max_memory_bytes: expected at least twice max_body_bytes"),
        ({"certificates": {"shop": "sales"}}, "certificates: has no effect without client_ca"),
        ({"users": {"root": "-"}}, "users: has no effect without a unix: address"),
        ({"gateway": {"http": ["unix:/x"]}, "users": {"65534": "-"}}, "users.65534: expected another user"),
        ({"gateway": {"http": ["unix:/x"]}, "users": {"no such": "-"}}, "users.no such: expected a user of this host"),
        (
            {"gateway": {"http": ["unix:/x"]}, "users": {"0": "-", "root": "x"}},
            "users.root: duplicate user",
        ),
        (
            {"gateway": {"grpc": ["0.0.0.0:8001"], "insecure": True, "shared_memory": True}},
            "gateway.shared_memory: expected only addresses on this host, got 0.0.0.0:8001",
        ),
        ({"users": 1}, "users: expected map, got int 1"),
    ],
)
def test_error_names_its_key(content: dict[str, Any], problem: str) -> None:
    _, problems = parsed(content)
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_public_addresses_need_tls_and_credentials() -> None:
    others: dict[str, Any] = {"http": ["0.0.0.0:8000"], "tls_cert": "/dev/null", "tls_key": "/dev/null"}
    assert parsed({"gateway": others})[1] == []
    assert (
        "would be accepted without credentials; expected no `anonymous`"
        in parsed({"gateway": {**others, "anonymous": "guests"}})[1][0]
    )
    assert parsed({"gateway": {**others, "anonymous": "guests", "client_ca": "/dev/null"}})[1] == []
    assert parsed({"gateway": {"http": ["0.0.0.0:8000"], "anonymous": "guests", "insecure": True}})[1] == []


def test_checks_sockets_of_service_manager() -> None:
    problems = ErrorCollector()
    content = {"gateway": {"http": ["127.0.0.1:1"], "anonymous": "-"}, "users": {"root": "-"}}
    config = parse(content, Path("/"), problems, ["127.0.0.1:8000", "unix:/run/http.sock"])
    assert config.gateway.http_addresses == (
        ListenAddress(host="127.0.0.1", port=8000),
        ListenAddress(path="/run/http.sock"),
    )
    assert not problems.errors
    parse(content, Path("/"), problems, ["0.0.0.0:8000", "unix:/run/http.sock"])
    assert str(problems.errors[0]).startswith(
        "gateway.http[0]: 0.0.0.0:8000: requests from other hosts would be sent without TLS"
    )


def test_reports_all_errors_with_file_name(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[gateway]\nhttp = 1\nmax_in_flight = 0\ntokens = '/nowhere'\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [each.partition(": expected")[0] for each in caught.value.problems] == [
        f"{path}: gateway.http",
        f"{path}: gateway.max_in_flight",
        "/nowhere: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("content", "problem"), [(b"[gateway", "not TOML"), (b"a = 1 #\xff", "not UTF-8: invalid byte 0xff at offset 7$")]
)
def test_rejects_invalid_toml(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none")


def test_rejects_pipes_and_huge_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    for name, problem in (("pipe", "expected a regular file"), ("huge", "expected a file of at most 4,194,304 bytes")):
        with pytest.raises(ConfigError, match=problem):
            load(tmp_path / name)


def test_keys_that_need_a_restart() -> None:
    before, _ = parsed({})
    after, _ = parsed({"gateway": {"tokens": "/t", "anonymous": "x", "max_in_flight": 1, "http": ["127.0.0.1:1"]}})
    assert keys_needing_restart(before, after) == ["http", "max_in_flight"]


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFIGURATION_DIRECTORY", raising=False)
    assert default_path() == Path("/etc/weightd/gateway.toml")
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", "/etc/elsewhere")
    assert default_path() == Path("/etc/elsewhere/gateway.toml")
