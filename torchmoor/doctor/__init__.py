"""Checks of a machine before a fleet starts, and of a running fleet, for `torchmoor doctor`. Each is a function."""
