"""Metrics over HTTP: what a scrape may ask, how the text is made between other work, and whom it is sent to.

Whoever connects here is a stranger. All that is read is the head of a request, and the answer to all is one text.
"""
