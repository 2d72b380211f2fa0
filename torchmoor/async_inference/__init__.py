"""Asynchronous inference: a durable queue, object stores, workers and notifications.

May import metrics, config, wire and errors; never proxy, fleet or admin.
"""
