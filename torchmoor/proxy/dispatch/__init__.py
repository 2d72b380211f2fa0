"""One request's instance: choice, lease, wait and retry, and the reason for each.

May import instances, routing, access, http and what is below the proxy.
"""
