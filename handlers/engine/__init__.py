"""Engines, which compute answers, and the contract between them and chat."""
