"""`weightctl install-units`: the files that make weightd a service of systemd, put where the system looks for them.

`program` finds what the units start, `plan` says which file goes where, `files` compares and writes, `command` tells.
"""
