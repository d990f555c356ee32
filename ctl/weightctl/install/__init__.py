"""`weightctl install-units`: the files that make weightd a service of systemd, put where the system looks for them.

`plan` finds the program and says which file goes where, `files` compares and writes, `command` reports.
"""
