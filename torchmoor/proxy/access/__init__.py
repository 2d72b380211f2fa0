"""Checks of callers: credentials, signatures, TLS and exposure.

May import http and what is below the proxy.
"""
