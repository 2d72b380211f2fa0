"""Loads Hugging Face checkpoints for the engine. Imports handlers.settings, handlers.errors and handlers.s3 only."""
