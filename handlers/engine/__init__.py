"""The thread that owns the device: sequences in, tokens out."""
