"""The parts of make_reference.py: one module for each kind of page."""
