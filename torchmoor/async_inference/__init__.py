"""Asynchronous inference: requests that wait in a queue and answer into an object store."""
