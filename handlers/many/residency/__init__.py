"""Decides which models are on the device, the host and the disk. Sees a model only as a `ResidentModel`."""
