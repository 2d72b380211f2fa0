"""The parts of make_smollm2.py."""
