"""Man pages and shell completion from what `--help` is made of, so that neither can say anything else.

`commands` reads an argument parser, `page` writes a man page of it by means of `roff`, `completion` a script for bash.
Each program makes its own: `weightd.daemon.manual` and `weightd.ctl.manual`.
"""
