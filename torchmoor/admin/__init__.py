"""The operators' plane: JSON API, metrics page and dashboard.

It reads the fleet's state, and changes it by operations.
"""
