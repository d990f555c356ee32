"""The shim: a small process between the daemon and its holders and workers, which keeps them alive without the daemon.

The shim is the parent of holders and workers, and they die with it (`weightd_common.process_start`). A socket pair
connects the shim with the daemon. When no process holds the daemon's end of the socket pair any more, the shim kills
all holders and workers. A service manager holds a duplicate of the daemon's end while the service runs, also during
restarts and crashes of the daemon, and closes the duplicate when the service is shut down. So the shim need not know
why a daemon has exited.
"""
