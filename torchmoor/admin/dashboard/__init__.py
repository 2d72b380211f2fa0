"""The operators' web page: the fleet now and in the last minutes, and the actions on it."""
