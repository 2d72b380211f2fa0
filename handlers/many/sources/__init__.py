"""Finds and reads models in a directory or in S3. Keeps nothing."""
