"""Format of the audit log, which other programs parse."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.platform import audit
from weightd_daemon.platform.audit import AuditEntry, RefusalLog
from weightd_daemon.platform.log_setup import LineFormatter

ENTRY = AuditEntry("update", "uid 1001", "ann", "m", "/m.onnx")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "weightd.audit"]


def parsed(line: str) -> dict[str, str]:
    """Parse an entry by the rules of the documentation."""
    assert line.startswith("audit ")
    decoder, fields, position = json.JSONDecoder(), dict[str, str](), len("audit ")
    while position < len(line):
        name = re.compile("([a-z0-9_]+)=").match(line, position)
        assert name is not None, line[position:]
        fields[name[1]], position = decoder.raw_decode(line, name.end())
        position += 1
    return fields


def test_writes_only_fields_with_a_value(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit.write(ENTRY, audit.OK, sha256="5" * 64)
    [record] = caplog.records
    expected = (
        f'audit action="update" result="ok" user="uid 1001" tenant="ann" model="m" path="/m.onnx" sha256="{"5" * 64}"'
    )
    assert (record.getMessage(), record.levelno) == (expected, logging.INFO)
    fields = {"AUDIT_ACTION": "update", "AUDIT_RESULT": "ok", "AUDIT_USER": "uid 1001", "AUDIT_TENANT": "ann"}
    fields |= {"AUDIT_MODEL": "m", "AUDIT_PATH": "/m.onnx", "AUDIT_SHA256": "5" * 64, "MODEL": "m"}
    assert record.__dict__["journal_fields"] == fields
    audit.write(AuditEntry("reload", audit.OPERATOR), audit.FAILED, "line 3: wrong")
    assert (caplog.records[1].levelno, lines(caplog)[1]) == (
        logging.WARNING,
        'audit action="reload" result="failed" user="operator" detail="line 3: wrong"',
    )


@given(st.text(), st.text(), st.text())
def test_client_text_cannot_forge_lines_or_fields(model: str, path: str, detail: str) -> None:
    log = logging.getLogger("weightd.audit")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        audit.write(ENTRY._replace(model=model, path=path), audit.OK, detail)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    [record] = records
    line = LineFormatter("%(message)s").format(record)
    assert line.isascii()
    assert line.isprintable()
    found = parsed(line)
    expected = {"action": "update", "result": "ok", "user": "uid 1001", "tenant": "ann", "model": model, "path": path}
    assert {name: value for name, value in found.items() if name != "detail"} == {
        k: v for k, v in expected.items() if v
    }


def test_counts_repeated_refusals_per_user(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog()
    other = ENTRY._replace(tenant="ben", user="uid 1002")
    for each in range(1000):
        refusals.write(ENTRY, audit.REFUSED, "no", each / 1000)
    refusals.write(other, audit.REFUSED, "no", 1.0)
    refusals.write(ENTRY, audit.REFUSED, "no", 10.0)
    found = [parsed(each) for each in lines(caplog)]
    assert [(each["tenant"], each.get("suppressed", "")) for each in found] == [
        ("ann", ""),
        ("ben", ""),
        ("ann", "999"),
    ]


def test_logs_one_entry_for_clients_without_a_tenant(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog()
    for each in range(300):
        refusals.write(AuditEntry("infer", f"uid {each}"), audit.REFUSED, "no", 0.0)
        refusals.write(AuditEntry("infer", f"host {each}", "default"), audit.REFUSED, "no", 0.0)
    assert len(lines(caplog)) == 1
