from __future__ import annotations

import pytest

from weightd_common.launch_arguments import RendezvousInfo

RANK = RendezvousInfo(1, 2, 120, 68, reply_rank=1, port=8118, group_info="/g", buffer_mib=200)


@pytest.mark.parametrize("meeting", [RANK, RANK._replace(reply_rank=None), RendezvousInfo(-1, 2, 30, 5)])
def test_reads_written_rendezvous(meeting: RendezvousInfo) -> None:
    assert RendezvousInfo.from_json(meeting.json()) == meeting


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rank":1,"size":2,"connect_timeout":1,"exec_timeout":1,"x":1}'])
def test_rejects_invalid_rendezvous(text: str) -> None:
    with pytest.raises(ValueError, match="xpect"):
        RendezvousInfo.from_json(text)


def test_reply_rank_has_outputs() -> None:
    others = [RANK._replace(rank=0), RANK._replace(reply_rank=None)]
    assert [each.has_outputs for each in [RANK, *others]] == [True, False, True]
