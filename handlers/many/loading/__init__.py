"""Loading: from a checkpoint folder to a model that answers."""
