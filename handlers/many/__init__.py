"""Serves many models from one worker. May import handlers.chat, handlers.models and below."""
