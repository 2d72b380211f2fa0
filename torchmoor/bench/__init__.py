"""A load of our own against a running endpoint: `torchmoor bench`. Needs nothing of the proxy but its address."""
