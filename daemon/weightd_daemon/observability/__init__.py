"""What can be seen of a running daemon. Only looks: nothing here changes anything.

May import `models` and what is below them; what clients have is told by numbers.
"""
