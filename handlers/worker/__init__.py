"""The worker's process: device, memory, threads, child processes, counters. Imports handlers.errors only."""
