"""The operators' plane: server, JSON views, metrics page and dashboard."""
