"""What a host says of itself: gathered, never judged."""
