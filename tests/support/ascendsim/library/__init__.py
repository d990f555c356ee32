"""Python API of MindSpore Lite 2.7.0, as far as a model server needs it.

Errors of the vendor's Python layer (`context`, `tensor`, `model`) have a type and a text. The C++ layer (`native`,
`load`) only reports failure, with the reason in the log.
"""
