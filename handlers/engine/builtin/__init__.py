"""The built-in engine: continuous batching over one model, with a KV cache in blocks."""
