"""Definitions that handlers and proxy share. Standard library only."""
