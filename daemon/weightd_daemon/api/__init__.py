"""The client API: decodes messages of clients, authorizes and handles them, and sends the replies.

The package passes requests to the package `models`. It may import `models` and the packages in lower layers. For
operations on the whole daemon, such as a reload, it uses the functions in `DaemonControl`, which the daemon passes in.
"""
