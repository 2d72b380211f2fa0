"""`python -m torchmoor` is the same as `torchmoor`."""

from torchmoor.cli.main import main

main()
