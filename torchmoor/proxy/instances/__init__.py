"""State of each instance: its load, breaker, recovery and source, and the registry of all endpoints.

May import routing, access, http and what is below the proxy.
"""
