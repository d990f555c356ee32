"""What daemon, worker and client need alike and is not the wire. May import `weightd.protocol`."""
