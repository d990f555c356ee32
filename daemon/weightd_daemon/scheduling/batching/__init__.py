"""Rows: what of several requests runs in one batch, what of one request in several.

And how answers are put together.
"""
