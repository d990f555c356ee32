"""The command-line client `weightctl`.

Each command is one module or package with its arguments, its requests and its output. Commands do not import each
other. The package imports only `weightd`, `weightd_common` and `weightd_protocol`: weightctl is a client, and code of
the daemon's package runs in a separate process if a command needs it.
"""
