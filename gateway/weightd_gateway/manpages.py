"""The manual of the gateway: weightd-gateway.toml(5), and a configuration to begin with.

`python -m weightd_gateway.manpages DIR` writes them; `weightctl install-units` puts them where `man` looks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from weightd_common.commandline import Parser
from weightd_common.manual.reference import Key, iterate_keys
from weightd_common.manual.roff import ManPage, bold, italic
from weightd_gateway.config.schema import GatewayConfig
from weightd_protocol.version import VERSION

_DESCRIPTION = """\
The file that `weightd gateway` reads, in TOML. Every key has a default, but nobody may ask before `tokens`,
`anonymous`, or one of the tables `[certificates]` and `[users]` says who. A key that is unknown, or a value that a key
does not take, is refused with its name and what was expected, all of them at once, and `weightd gateway --check` says
so without serving anything. Paths are absolute, or relative to the directory of this file; `~` is not expanded.

SIGHUP has the file and that of the tokens read again: `tokens`, `anonymous` and the two tables hold from then on, also
for who is connected; all else takes a restart. A gateway that was started in the foreground of a terminal stops when
the terminal closes, unless it runs under nohup(1)."""

_CALLERS = """\
A caller asks for a tenant of the daemon's configuration, which has to let the gateway do so (`acts_for`), or, where "-"
stands in the place of a tenant, for the gateway itself. A token goes before a certificate, that before a user, and that
before `anonymous`."""

_CERTIFICATES = (
    "With `client_ca`: the common name of a certificate, and the tenant that its owner asks for, as in "
    '`"shop.example.org" = "sales"`.'
)

_USERS = (
    "With a unix: address among `http`: a user of this host by name or number, as the kernel tells of who has "
    'connected, and its tenant, as in `alice = "research"`.'
)

_EXAMPLE = """\
[gateway]
anonymous = "-"                 # whoever is on this host may ask, as a client of weightd's may
"""

_EXAMPLE_HEADER = """\
# The configuration of the gateway, see weightd-gateway.toml(5); `weightd gateway --check FILE` says what is wrong with
# it. What is commented out shows the default.
[gateway]
"""

_EXAMPLE_FOOTER = """\
# [certificates]
# "shop.example.org" = "sales"

# [users]
# alice = "research"
"""


def page() -> str:
    """Return weightd-gateway.toml(5)."""
    page = ManPage("weightd-gateway.toml", 5, VERSION, "the configuration of the gateway of weightd")
    page.heading("DESCRIPTION")
    page.text(_DESCRIPTION)
    page.heading("[gateway]")
    for key in iterate_keys(GatewayConfig):
        page.entry(f"{bold(key.name)} ({italic(_key_type(key))})", key.meaning)
    page.heading("CALLERS")
    page.text(_CALLERS)
    for name, meaning in (("certificates", _CERTIFICATES), ("users", _USERS)):
        page.entry(bold(f"[{name}]"), meaning)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/gateway.toml"), "What `weightd gateway` reads where it is given no other file.")
    page.heading("EXAMPLE")
    page.code(_EXAMPLE)
    page.see_also([("weightd", 8), ("weightd.toml", 5)])
    return page.source()


def _key_type(key: Key) -> str:
    return f"{key.kind}; default {key.default}" if key.default.strip('"') else key.kind


def example() -> str:
    """Return a configuration in which whoever is on this host may ask, and each other key is a comment."""
    return "\n".join(
        [_EXAMPLE_HEADER, *(line for key in iterate_keys(GatewayConfig) for line in _lines(key)), _EXAMPLE_FOOTER]
    )


def _lines(key: Key) -> Iterator[str]:
    yield from textwrap.wrap(" ".join(key.meaning.split()), 116, initial_indent="# ", subsequent_indent="# ")
    yield 'anonymous = "-"\n' if key.name == "anonymous" else f"# {key.name} = {key.default}\n"


def main() -> None:
    """Write the files, in the directories that `weightctl install-units` knows."""
    parser = Parser(prog="python -m weightd_gateway.manpages", description="Writes a man page and a configuration.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; it is made")
    directory: Path = parser.parse_args().directory
    for name, text in (("man/weightd-gateway.toml.5", page()), ("examples/gateway.toml", example())):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
