from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightd_daemon.platform import environment

ROOT = Path(__file__).resolve().parents[3]
SECRETS = {"https_proxy": "http://me:secret@proxy", "AWS_SECRET_ACCESS_KEY": "secret", "PASSWORD": "secret"}
NEEDED = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": "/p", "ASCEND_HOME_PATH": "/a", "HCCL_CONNECT_TIMEOUT": "1"}


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ((), {}),
        (("PASSWORD", "AWS"), {"PASSWORD": "secret"}),
        (("AWS_*",), {"AWS_SECRET_ACCESS_KEY": "secret"}),
        (("*",), SECRETS),
    ],
)
def test_children_get_what_engines_read_and_what_is_named(more: tuple[str, ...], kept: dict[str, str]) -> None:
    there = {**SECRETS, **NEEDED}
    environment.remove_unlisted(there, more)
    assert there == {**NEEDED, **kept}


def test_what_the_drop_in_for_cards_and_the_workers_set_is_passed() -> None:
    """A variable that the project itself names for an engine is one that children get."""
    sources = [*ROOT.glob("worker/weightd_worker/engines/**/*.py"), *ROOT.glob("systemd/**/*.conf")]
    text = "\n".join(each.read_text("utf-8") for each in sources)
    names = set(re.findall(r'os\.environ(?:\[|\.get\(|\.setdefault\()"(\w+)"', text))
    names |= set(re.findall(r'^#?\s*Environment="?(\w+)=', text, re.MULTILINE))
    assert len(names) > 3
    there = dict.fromkeys(names, "1")
    environment.remove_unlisted(there)
    assert there.keys() == names


def test_the_list_is_documented() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    assert [each for each in environment.DEFAULT_VARIABLES if f"`{each}`" not in page] == []
