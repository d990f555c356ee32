"""Servers of the Open Inference Protocol, each as its documentation has it, and one client of them all."""
