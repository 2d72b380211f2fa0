"""Settings, and the configuration file that they are read from."""
