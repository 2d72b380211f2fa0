"""Routing: strategies, placement of sessions and models, and waiting, as pure functions and counters.

May import the standard library only; no sockets, clocks or files.
"""
