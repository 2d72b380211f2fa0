"""A request as a service gets it, and its reply. Imports handlers.errors only."""
