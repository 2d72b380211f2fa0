"""What would keep a fleet from running on this machine, found before it is started: `torchmoor doctor`."""
