"""The demo: a digit classifier with 129 MiB of weights, and handwritten digits as inputs."""
