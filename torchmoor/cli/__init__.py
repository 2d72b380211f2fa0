"""The command line: parses options, prints results. The top layer; it may import every package."""
