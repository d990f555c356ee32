"""Sessions of child processes: a session says HELLO and executes orders until the daemon stops it."""
