"""The commands, one per file: they parse and print. torchmoor.cli.main lists them."""
