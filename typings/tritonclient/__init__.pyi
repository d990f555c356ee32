# The part of Triton's clients that the tests use.
