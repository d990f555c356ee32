"""The message classes of what is spoken here, made once."""

from __future__ import annotations

from weightd_gateway.grpc import schema_tables
from weightd_gateway.grpc.schema import Messages

INFERENCE = Messages(schema_tables.INFERENCE)
HEALTH = Messages(schema_tables.HEALTH)
REFLECTION = Messages(schema_tables.REFLECTION)
REFLECTION_V1ALPHA = Messages(schema_tables.REFLECTION_V1ALPHA)
STATUS = Messages(schema_tables.STATUS)
