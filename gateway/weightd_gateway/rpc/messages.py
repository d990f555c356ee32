"""The message classes of what is spoken here, made once."""

from __future__ import annotations

from weightd_gateway.rpc import tables
from weightd_gateway.rpc.descriptors import Messages

INFERENCE = Messages(tables.INFERENCE)
HEALTH = Messages(tables.HEALTH)
REFLECTION = Messages(tables.REFLECTION)
REFLECTION_V1ALPHA = Messages(tables.REFLECTION_V1ALPHA)
STATUS = Messages(tables.STATUS)
