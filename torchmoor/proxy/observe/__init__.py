"""What is told of each request: the access log, and traces."""
