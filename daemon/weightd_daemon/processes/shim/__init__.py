"""The shim: a small process between the daemon and its holders and workers, which keeps them alive without the daemon.

The shim is the parent of holders and workers, and they die with it (`weightd_common.process_start`). The shim kills all
of them when every duplicate of the daemon's end of its socket is closed. A service manager holds such a duplicate while
the service runs, over restarts and crashes of the daemon, and closes it when the service is stopped. So the shim need
not know why a daemon has exited.
"""
