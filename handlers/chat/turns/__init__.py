"""Turns: from a question to the last byte of its answer. Uses `sessions` and `pictures`."""
