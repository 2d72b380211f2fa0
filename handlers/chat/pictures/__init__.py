"""Pictures: loading, decoding, and the store that keeps each once."""
