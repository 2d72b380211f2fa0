"""Decides which models are on the device, the host and the disk. Knows tasks and requests only as `ResidentModel`."""
