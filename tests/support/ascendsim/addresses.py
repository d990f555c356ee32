"""The addresses of the cards' network interfaces."""

from __future__ import annotations


def of_card(card: int) -> str:
    """That of a physical card."""
    return f"192.168.100.{101 + card}"
