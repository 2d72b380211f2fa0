"""Asynchronous inference: requests in a durable queue, objects in stores, workers between them, and notices."""
