"""`weightctl install-units`: installs the files that make weightd a systemd service.

`plan` finds the program, decides where each file goes, and writes the files; `command` reports the result.
"""
