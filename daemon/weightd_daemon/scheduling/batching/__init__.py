"""Rows: what of several requests runs in one job, what of one request in several, and how answers are put together."""
