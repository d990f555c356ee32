"""The shim: a tiny process between the daemon and its holders and workers, so that these outlive the daemon.

It is their parent. They die with it (`weightd_common.process_start`), and it ends them all once nobody holds the other
end of its socket any more. A service manager holds a duplicate of that end for as long as the service is to go on, over
a restart or a crash of the daemon, and closes it when the service is stopped. So nobody has to guess why the daemon has
ended.
"""
