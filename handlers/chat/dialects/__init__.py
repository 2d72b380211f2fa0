"""Dialects: one file reads and writes one dialect. Uses the shared types of `handlers.chat` only."""
