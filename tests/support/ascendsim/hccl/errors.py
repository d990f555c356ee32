"""What HCCL says of a failure: a code, and a text. Both only reach the log."""

from __future__ import annotations


class HcclError(Exception):
    """A call that did not succeed; `code` is one of hccl fault_diagnosis/, such as "EI0002"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
