from testkit.fakedaemon import address, client, daemon, directory

__all__ = ["address", "client", "daemon", "directory"]
