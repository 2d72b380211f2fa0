"""Where models come from: a directory or S3."""
