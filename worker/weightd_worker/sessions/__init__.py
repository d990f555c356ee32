"""Sessions of child processes: a session sends HELLO and executes the daemon's orders until the daemon sends Stop."""
