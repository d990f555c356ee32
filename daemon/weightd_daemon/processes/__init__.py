"""Process supervision: starts, forks, signals and reaps the holders, the workers and their helper processes.

`ProcessSupervisor` describes each process by a `ProcessSpec`, and starts it by a `Launcher` or by a fork. It passes the
messages and the exit of each child process to the `ProcessEventHandler` of that child. This package never imports
`models`.
"""
