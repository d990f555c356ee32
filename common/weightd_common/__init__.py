"""Modules that more than one of daemon, worker, client, weightctl and gateway needs, apart from the protocol.

The package imports only `weightd_protocol` of weightd and supports Python 3.7.
"""
