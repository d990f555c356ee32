"""What more than one of daemon, worker, client and weightctl needs, and is not the wire.

Imports `weightd_protocol` and nothing else of weightd; runs on Python 3.7.
"""
