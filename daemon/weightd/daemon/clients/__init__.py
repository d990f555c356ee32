"""Who asks: connections, their messages in, their answers out, and what all of that may take."""
