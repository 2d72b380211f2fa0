"""Loads checkpoint folders as models that answer requests. Imports the tasks, not the registry."""
