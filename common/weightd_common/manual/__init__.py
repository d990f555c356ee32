"""Man pages and shell completion from what `--help` is made of, so that neither can say anything else.

`commands` reads an argument parser, `page` writes a man page of it by means of `roff`, `completion` a script for bash.
Each program makes its own: `weightd_daemon.manual` and `weightctl.manual`.

By hand, because what argparse-manpage 4.8 and shtab 1.13 make of the same parsers is less. The former takes a line of a
help that begins with a dot for a request of roff, repeats the common options at each command, and fills examples; roff
is needed for weightd.toml(5) anyway. What the latter makes for bash completes neither `--option=value` nor what stands
behind an address, which bash takes apart at its colons. Both would have to run when the wheel is built, which then
needed Python 3.10 and all that the programs import; a checkout would have pages of yesterday, or none.
"""
