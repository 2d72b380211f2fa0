"""Definitions that handlers and proxy share: names, codes and formats. Standard library only.

Every archive carries a copy of this package, so it must not import anything else of torchmoor.
"""
