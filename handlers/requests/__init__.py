"""The request that a service gets, and its reply. Imports handlers.errors only."""
