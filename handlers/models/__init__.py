"""Hugging Face checkpoints behind one small interface."""
