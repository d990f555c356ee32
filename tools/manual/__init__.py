"""Generator of the manual: `make manual`. The output is committed; a test compares it with the sources.

`commands` reads an argument parser, `page` writes a man page, `completion` a script for bash; `programs` and
`configuration` have the contents.

The project writes pages and completion itself, because libraries have these faults: argparse-manpage 4.8 does not
escape help lines that begin with a dot, and repeats the common options at each command. The writer of docutils 0.23
uses requests of groff alone, and writes its version into each page. shtab 1.13 copies code under another licence
(MPL-2.0) into the script, which splits paths at spaces and completes neither `--option=value` nor the words after an
address, which bash splits at its colons.
"""
