"""Configuration file: parsing, validation and defaults, without side effects.

Of the daemon's packages, this one imports only `engines` and `platform`.
"""
