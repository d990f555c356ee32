"""The daemon: starts holders and workers, watches them, and routes requests to them.

It never imports an engine, never touches a card, and never reads or copies tensor bytes.
"""
