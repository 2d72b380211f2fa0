"""Assembles the parts of `torchmoor up` and `torchmoor serve`."""
