"""`weightctl install-units`: installs the files that make weightd a systemd service.

`plan` finds the program weightd, decides where each file is installed, and writes the files. `command` reports the
result.
"""
