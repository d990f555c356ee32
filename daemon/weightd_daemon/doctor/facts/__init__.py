"""What a host says of itself: gathered, never judged. Imports host, and neither trial nor verdicts."""
