"""Durable queues of asynchronous requests: SQLite and Redis. May import the request records, config and errors."""
