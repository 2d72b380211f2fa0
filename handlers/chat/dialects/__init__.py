"""Dialects of requests and answers, one per module. May import only the shared types of `handlers.chat`."""
