"""What the user wrote: read, checked and made complete. Nothing is begun here. May import `engines` and `host`."""
