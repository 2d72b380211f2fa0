"""Hundreds of models in one worker: where they come from, which are in memory, and what each of them does."""
