"""What can be seen of a running daemon. Only looks: nothing here changes anything."""
