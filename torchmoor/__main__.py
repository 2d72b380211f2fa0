"""`python -m torchmoor` is the same as `torchmoor`."""

from torchmoor.cli import main

main()
