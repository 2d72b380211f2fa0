"""Observers of finished requests: the access log and traces.

Only run imports this package; it may import everything in the proxy.
"""
