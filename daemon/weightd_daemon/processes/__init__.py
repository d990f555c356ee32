"""Processes: holders, workers and those that help to start them; started, heard, ordered and reaped.

`ProcessSupervisor` has them for whoever owns them, a `ProcessEventHandler`: that is told what becomes of them, and
nobody asks who it is. What is started is a `ProcessSpec`; how it is started is up to a `Launcher`. Imports generations,
config and platform, never models.
"""
