"""Notifications that a request has ended: SageMaker's message, sent to SNS topics and webhooks.

May import objects (outbound HTTP, threads), the request records, config and errors.
"""
