"""Assembly of `torchmoor up` and `torchmoor serve`. May import every package below cli and container."""
