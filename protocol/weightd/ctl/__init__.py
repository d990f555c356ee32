"""The command `weightctl`: asks a running daemon. One verb is one file: its arguments, its call, its rendering."""
