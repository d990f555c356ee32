"""The life of a process of weightd: HELLO, then one order after another, until the daemon stops it."""
