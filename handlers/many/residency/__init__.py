"""Which models are in memory, and what is loaded or evicted next."""
