"""Archives on disk: unpacking within limits, and a budget of bytes."""
