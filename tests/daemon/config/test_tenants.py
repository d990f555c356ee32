from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from weightd_common.curve_keys import PUBLIC, SECRET, format_key_file
from weightd_daemon.config.load import Config, ConfigError, parse
from weightd_daemon.config.tenants import TenantConfig, find_warnings
from weightd_protocol import limits

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
OTHER = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"


@pytest.fixture(autouse=True)
def _fake_user_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the user database: user alice has uid 1001, group mail exists, and nobody has uid 65534."""

    def user(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", {"alice": 1001, "nobody": 65534}[name], 0, "", "/", "/bin/false"))

    def group(name: str) -> grp.struct_group:
        return grp.struct_group((name, "x", {"mail": 8, "nogroup": 65534}[name], []))

    monkeypatch.setattr(pwd, "getpwnam", user)
    monkeypatch.setattr(grp, "getgrnam", group)


def parsed(base: Path, tenants: Any) -> Config:
    return parse({"tenants": tenants, "models": {"m": {"path": "/m.onnx"}}}, base)


def refusals(base: Path, tenants: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(base, tenants)
    return list(caught.value.problems)


def write_key(path: Path, key: str = KEY, kind: str = PUBLIC) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(format_key_file(kind, key), "ascii")
    path.chmod(0o600)
    return path


def test_users_groups_and_keys_are_resolved(tmp_path: Path) -> None:
    write_key(tmp_path / "keys" / "a.pub")
    write_key(tmp_path / "keys" / "b.pub", OTHER)
    write_key(tmp_path / "keys" / "again.pub")
    tenants = parsed(
        tmp_path,
        {
            "research": {
                "uids": ["alice", 1002, "1003", "1001"],
                "model_dirs": ["/models/a/", "b"],
                "groups": ["mail", 12],
                "keys": ["keys/a.pub", str(tmp_path / "keys" / "b.pub"), "keys/again.pub"],
            },
            "default": {},
        },
    ).tenants
    research = tenants["research"]
    assert research.user_ids == (1001, 1002, 1003)
    assert research.group_ids == (8, 12)
    assert research.public_keys == (KEY, OTHER)
    assert research.model_directories == ("/models/a", str(tmp_path / "b"))
    assert research.uids == ("alice", "1002", "1003", "1001")
    assert tenants["default"] == TenantConfig()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"uids": ["bob"]}, "uids[0]: expected a user of this host, by name or number, got str 'bob'"),
        ({"uids": ["a\0b"]}, "uids[0]: expected a user of this host, by name or number, got str 'a\\x00b'"),
        ({"uids": ["alice", "-1"]}, "uids[1]: expected a user of this host, by name or number, got str '-1'"),
        ({"uids": [-1]}, "uids[0]: expected integer, 0 to 4294967294, got int -1"),
        ({"uids": [2**32 - 1]}, "uids[0]: expected integer, 0 to 4294967294, got int 4294967295"),
        ({"uids": ["4294967295"]}, "uids[0]: expected the number of a user, 0 to 4294967294, got str '4294967295'"),
        ({"uids": ["\u0663"]}, "uids[0]: expected a user of this host, by name or number, got str '\u0663'"),
        ({"uids": [True]}, "uids[0]: expected text, 1 to 256 bytes, got bool True"),
        (
            {"uids": ["nobody"]},
            "uids[0]: expected another user, got str 'nobody': the kernel uses 65534 for every user that *",
        ),
        ({"uids": [65534]}, "uids[0]: expected another user, got str '65534': the kernel uses 65534 for *"),
        ({"groups": ["staff"]}, "groups[0]: expected a group of this host, by name or number, got str 'staff'"),
        ({"groups": ["nogroup"]}, "groups[0]: expected another group, got str 'nogroup': the kernel uses 65534 for *"),
        ({"models": ["bert-[ab]"]}, "models[0]: expected a name, or a pattern of ASCII letters, *, got *"),
        ({"models": [""]}, "models[0]: expected text, 1 to 256 bytes, got 0"),
        ({"acts_for": ["web-*", "b"]}, "acts_for[1]: expected the name of a table [tenants.NAME], got str 'b'"),
        ({"may": ["infer", "admin"]}, "may[1]: expected one of infer, load, operate, status, got str 'admin'"),
        ({"weight": 0}, "weight: expected number of more than 0 and at most 1000, got int 0"),
        ({"weight": 1e-4}, "weight: expected at least 0.001, got 0.0001"),
        ({"max_rate": -1}, "max_rate: expected number of at least 0 and at most 1000000, got int -1"),
        ({"max_connections": 2**31 + 1}, "max_connections: expected integer, 0 to 2147483648, got int 2147483649"),
        ({"priority_max": 17}, "priority_max: expected integer, 0 to 16, got int 17"),
        ({"user_ids": [1]}, "user_ids: unknown key; did you mean uids?"),
        ({"keys": ["~/a.pub"]}, "keys[0]: expected a path without ~, *"),
        (3, "expected a table, got int 3"),
    ],
)
def test_rejects_invalid_tenant(table: Any, problem: str, tmp_path: Path) -> None:
    [reported] = refusals(tmp_path, {"a": table})
    expected, star, _ = f"tenants.a{': ' if type(table) is int else '.'}{problem}".partition("*")
    assert reported.startswith(expected) if star else reported == expected


def test_invalid_tenant_tables_are_rejected(tmp_path: Path) -> None:
    assert refusals(tmp_path, 3) == ["tenants: expected tables [tenants.NAME]"]
    many: dict[str, Any] = {f"t{number}": {} for number in range(limits.MAX_TENANTS + 1)}
    assert refusals(tmp_path, many) == [
        f"tenants: expected at most {limits.MAX_TENANTS} tenants, got {limits.MAX_TENANTS + 1}"
    ]
    assert refusals(tmp_path, {"-a": {}})[0].startswith("tenants.-a: expected a tenant name of 1 to 64 ASCII letters")


def test_invalid_public_key_files_are_rejected(tmp_path: Path) -> None:
    write_key(tmp_path / "a.key", kind=SECRET)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    reported = refusals(tmp_path, {"a": {"keys": ["none.pub", "a.key", "pipe", "empty", "a\nb"]}})
    at = [f"tenants.a.keys[{index}]: {tmp_path}/" for index in range(5)]
    assert reported[0] == f"{at[0]}none.pub: No such file or directory"
    assert reported[1].startswith(f"{at[1]}a.key: expected a public key, got a secret one")
    assert reported[2] == f"{at[2]}pipe: expected a file"
    assert reported[3].startswith(f"{at[3]}empty: expected a line weightd-public-key KEY")
    assert reported[4] == f"{at[4]}a\\nb: No such file or directory"
    assert KEY not in "".join(reported)


def test_rejects_credentials_in_two_tenants(tmp_path: Path) -> None:
    for name in ("a.pub", "b.pub"):
        write_key(tmp_path / name)
    assert refusals(
        tmp_path,
        {
            "one": {"uids": ["alice"], "groups": [8, 9], "keys": ["a.pub"]},
            "two": {"uids": [1001], "groups": ["mail", 9], "keys": ["b.pub"]},
        },
    ) == [
        "tenants.two.uids: str '1001' is already in tenant one, as str 'alice'",
        "tenants.two.groups: str 'mail' is already in tenant one, as str '8'",
        "tenants.two.groups: str '9' is already in tenant one",
        "tenants.two.keys: str 'b.pub' is already in tenant one, as str 'a.pub'",
    ]


def test_acts_for_accepts_itself_and_patterns(tmp_path: Path) -> None:
    acts_for = ("web-*", "web", "other")
    tenants = parsed(tmp_path, {"web": {"acts_for": list(acts_for)}, "other": {"uids": [1]}}).tenants
    assert tenants["web"].acts_for == acts_for


def test_warns_about_ineffective_keys(tmp_path: Path) -> None:
    tenants = parsed(
        tmp_path,
        {
            "a": {"uids": [1], "models": ["m", "n", "x*"], "model_dirs": ["/models"]},
            "b": {"groups": [1], "may": []},
            "c": {},
            "d": {},
            "gateway": {"uids": [2], "acts_for": ["c*"]},
            "default": {},
        },
    ).tenants
    assert list(find_warnings(tenants, ["m"])) == [
        "tenants.a.models: there is no model 'n'",
        'tenants.a.model_dirs: has no effect without "operate" in `may`',
        "tenants.b.may: empty: the tenant has no rights",
        (
            "tenants.d: no client belongs to this tenant: it has neither uids nor groups nor keys, "
            "and no tenant acts for it"
        ),
    ]
