"""Gives a process that never imports mindspore_lite the simulated libascendcl.so; Python runs this at its start."""

from ascendsim import acl

acl.install()
