"""What reads the command lines of weightd's programs."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

EXIT_USAGE = 64
"""EX_USAGE of sysexits.h: the command line is wrong. argparse's own 2 means something else in these programs."""


class Parser(argparse.ArgumentParser):
    """An argument parser that ends with `EXIT_USAGE`; so do those of its commands."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")
