"""Durable queues of asynchronous requests: SQLite and Redis."""
