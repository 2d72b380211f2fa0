"""Notifications that a request has ended: SNS topics and webhooks."""
