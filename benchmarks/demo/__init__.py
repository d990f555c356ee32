"""The demo: a digit classifier with 129 MiB of weights, and the handwritten digits that it reads."""
