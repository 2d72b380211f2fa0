"""The commands, a file each: they parse and print. torchmoor.cli.main knows them by name."""
