"""Writes the manual of the daemon into a directory: `python -m weightd_daemon.manual DIR`."""

from __future__ import annotations

from pathlib import Path

from weightd_common.commandline import Parser
from weightd_daemon.manual import configuration, program


def main() -> None:
    """Write the files, in the directories that `weightctl install-units` knows."""
    parser = Parser(
        prog="python -m weightd_daemon.manual", description="Writes man pages, completion, and a configuration."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; it is made")
    directory: Path = parser.parse_args().directory
    files = {
        "man/weightd.8": program.page(),
        "man/weightd.toml.5": configuration.page(),
        "completions/weightd": program.bash(),
        "examples/weightd.toml": configuration.example(),
    }
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
