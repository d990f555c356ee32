"""The Python API of MindSpore Lite 2.7.0, as far as a program needs it that serves models.

Above the line that the vendor draws between Python and C++ (`context`, `tensor`, `model`) an error has
a type and a text; below it (`native`, `load`) there is only failure, and its cause in the log.
"""
