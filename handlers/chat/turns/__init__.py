"""Turns: from a question to the last byte of its answer. May import `sessions` and `images`."""
