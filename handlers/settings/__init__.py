"""Settings of a worker, from its archive and the environment. Imports handlers.errors only."""
