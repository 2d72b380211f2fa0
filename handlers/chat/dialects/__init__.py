"""Request bodies and answer forms, one dialect per file."""
