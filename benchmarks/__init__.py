"""Measure the project against its baselines; `make bench NAME=proxy` runs one benchmark."""
