"""Process supervision: starts, forks, signals and reaps the holders, the workers and their helper processes.

The caller of `ProcessSupervisor` describes a process by a `ProcessSpec`; a `Launcher` starts the process. The
supervisor reports the messages and the exit of each child to the `ProcessEventHandler` of that child. This package
never imports `models`.
"""
