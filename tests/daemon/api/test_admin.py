"""Tests of the operations of operators, with a fake model and fake permissions."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightd_common.safe_open import OPERATOR
from weightd_daemon.api.admin import AdminApi, DaemonControl
from weightd_daemon.models.registry import ConfigDiff
from weightd_protocol.messages.control import RESTART, Load, Reload

CONNECTION: Any = SimpleNamespace(key=b"client", tenant=None, identity=SimpleNamespace(audit_name="uid 0"))


def test_restart_keeps_replaced_weights() -> None:
    updates: list[dict[str, Any]] = []
    model = SimpleNamespace(
        name="m",
        loading=SimpleNamespace(is_unloaded=False, may_retry=False),
        versions=SimpleNamespace(current=SimpleNamespace(weights="/new.npz")),
        update=lambda *_, **named: updates.append(named),
    )
    registry = SimpleNamespace(find=lambda *_: model, is_closed=False)
    authorizer = SimpleNamespace(
        authorize_load=lambda *_: None, check_operator=lambda *_: None, file_grant=lambda _: OPERATOR
    )
    daemon = DaemonControl(*[cast(Any, None)] * 4)
    admin = AdminApi(cast(Any, registry), cast(Any, authorizer), daemon, cast(Any, None))
    admin.on_load(CONNECTION, Load("1", "m", RESTART, wait=True), (), 0.0)
    assert updates == [{"path": "", "weights": "/new.npz", "rollback": False, "grant": OPERATOR}]


def test_audit_log_does_not_call_a_dry_run_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd.audit")
    authorizer = SimpleNamespace(check_reload=lambda *_: None)
    responses = SimpleNamespace(reply=lambda *_: None)
    daemon = DaemonControl(*cast(Any, (None, lambda on_done, _: on_done(ConfigDiff((), (), (), ())), None, None)))
    admin = AdminApi(cast(Any, None), cast(Any, authorizer), daemon, cast(Any, responses))
    for dry_run in (True, False):
        admin.on_reload(CONNECTION, Reload("1", dry_run), (), 0.0)
    assert [each.getMessage() for each in caplog.records] == [
        f'audit action="{action}" result="ok" user="uid 0"' for action in ("dry_run", "reload")
    ]
