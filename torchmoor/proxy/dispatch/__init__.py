"""One request's instance: choice, lease, wait, retry, and the reason for each."""
