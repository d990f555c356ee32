"""The command-line client `weightctl`.

Each command is a module or package with the command's arguments, requests and output. Commands do not import each
other. This package imports only `weightd`, `weightd_common` and `weightd_protocol`, because weightctl is a client of
the daemon. A command that needs code of the daemon's package starts it in a separate process.
"""
