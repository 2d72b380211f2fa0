"""Load test of a running endpoint, for `torchmoor bench`. It uses clients/ and needs only the proxy's address."""
