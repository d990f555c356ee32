"""Who asks: connections, their messages in, their answers out, and what all of that may take.

Gives requests to `models`; may import those and what is below them, and knows of the daemon but a port.
"""
