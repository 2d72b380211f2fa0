"""What models do with requests, one kind of task a file."""
