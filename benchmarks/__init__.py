"""Benchmarks, which measure the project against its baselines; `make bench NAME=proxy` runs one."""
