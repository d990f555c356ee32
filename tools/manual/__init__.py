"""Writes the manual: `make manual`, whose output is committed and packed; a test compares it with the sources.

`commands` reads an argument parser, `page` writes a man page, `completion` a script for bash, `programs` and
`configuration` say what is in them.

Own code writes pages and completion, for what libraries make of the same parsers is less. argparse-manpage 4.8 takes a
line of a help that begins with a dot for a request of roff, and repeats the common options at each command. The writer
of docutils 0.23 uses requests that groff alone has, and writes its version into each page. shtab 1.13 puts its own
code, under another licence (MPL-2.0), into the script, which splits paths at blanks and completes neither
`--option=value` nor what follows an address, which bash takes apart at its colons.
"""
