"""Addresses of the cards' network interfaces."""

from __future__ import annotations


def of_card(card: int) -> str:
    """Return the address of a physical card."""
    return f"192.168.100.{101 + card}"
