"""Images: loading, decoding, and the store that keeps each once. Uses the shared types of `handlers.chat` only."""
