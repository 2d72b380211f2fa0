"""Images: loading, decoding, and the store that holds each once.

May import only the shared types of `handlers.chat`.
"""
