"""Handover from one daemon to the next: the instance lock, the state file, stored counters, shim and service manager.

`ShimLauncher` keeps holders and workers alive between two daemons. `state` writes a file that describes these processes
for the next daemon, and `CounterStore` a file with the usage counters. `ManagedService` notifies the service manager.
"""
