"""Workers that claim requests, send them to instances and publish the results.

May import queues, objects, notifications, config and metrics. The proxy implements `capacity`.
"""
