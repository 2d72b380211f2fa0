"""Reads and answers requests, one kind of task per file. Imports no loading and no residency."""
