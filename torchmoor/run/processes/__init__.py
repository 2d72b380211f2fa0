"""The data plane in several processes on one port.

Owns the parent's side, the child process, and the messages between them. Each child has its own counts and queues.
May import everything that run may import.
"""
