"""What shows that a process computes on the right weights: a question, found or given, and its answer, compared.

May import `engines`; no library, and no message is sent from here.
"""
