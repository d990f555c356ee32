"""What is made of the facts. No I/O."""
