"""Settings groups and the configuration file. May import torchmoor.wire and torchmoor.errors only."""
