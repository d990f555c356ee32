"""The command `python -m tools.manual`, which writes each file of the manual."""

from __future__ import annotations

from pathlib import Path

from tools.manual import configuration, programs

ROOT = Path(__file__).parents[2]


def files() -> dict[str, str]:
    """Return the content of each file by its path in the repository; `weightctl install-units` installs `manual/`."""
    return {
        "docs/configuration.md": configuration.reference(),
        "manual/completions/weightctl": programs.weightctl_completion(),
        "manual/completions/weightd": programs.weightd_completion(),
        "manual/examples/gateway.toml": configuration.gateway_file(),
        "manual/examples/weightd.toml": configuration.weightd_file(),
        "manual/man/weightctl.1": programs.weightctl_page(),
        "manual/man/weightd-gateway.toml.5": configuration.gateway_page(),
        "manual/man/weightd.8": programs.weightd_page(),
        "manual/man/weightd.toml.5": configuration.weightd_page(),
    }


if __name__ == "__main__":
    for name, text in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
