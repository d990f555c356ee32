"""The manual of the daemon: weightd(8), weightd.toml(5), completion, and a configuration to begin with.

`python -m weightd_daemon.manual DIR` writes them; `weightctl install-units` puts them where `man` looks.
"""
