"""The chat handler with a scripted model in the place of the real one: an entry file, and the model."""
