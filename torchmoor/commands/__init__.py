"""The commands, a file each: they parse and print. torchmoor.cli knows them by name."""
