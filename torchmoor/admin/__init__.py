"""The operators' plane: JSON API, metrics page and dashboard. It reads the fleet and changes it only by operations."""
