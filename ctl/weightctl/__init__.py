"""The command `weightctl`: asks a running daemon.

One command is one file, or one folder: its arguments, its call, its rendering. No command imports another. Imports
`weightd`, `weightd_common` and `weightd_protocol`: weightctl is a client, and what it wants of the daemon's
program it asks in a process of its own.
"""
