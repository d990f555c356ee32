"""Handover from one daemon to the next: the instance lock, the state file, stored counters, shim and service manager.

`ShimLauncher` keeps holders and workers alive between two daemons, `state` describes them in a file, and `CounterStore`
keeps the counters. `ManagedService` reports to the service manager.
"""
