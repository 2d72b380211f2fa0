"""The front proxy: everything that a request passes through."""
