"""Processes: holders, workers and those that help to start them; started, heard, ordered and reaped.

`Backend` has them for whoever owns them, an `Owner`: that is told what becomes of them, and nobody asks who it is. What
is started is a `Launch`; how it is started is up to a `Launcher`. Imports generations, config and host, never models.
"""
