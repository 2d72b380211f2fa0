"""The fleet of instances: launches, probes, discovers, scales and drains them.

May import proxy/instances, metrics, async_inference and below; run and the admin plane use it.
"""
