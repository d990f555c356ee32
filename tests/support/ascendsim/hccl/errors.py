"""Errors of HCCL: a code and a text, which only appear in the log."""

from __future__ import annotations


class HcclError(Exception):
    """Error of a call; `code` is one of hccl fault_diagnosis/, such as "EI0002"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
