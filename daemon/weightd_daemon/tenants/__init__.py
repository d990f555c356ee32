"""Tenants: their identities, quotas and usage."""
