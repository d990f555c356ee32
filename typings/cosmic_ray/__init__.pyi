# The part of cosmic-ray 8.7 that tests/mutation uses.
