"""Finds and reads models in a directory or in S3. Has no state."""
