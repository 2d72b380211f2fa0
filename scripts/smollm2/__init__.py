"""What make_smollm2.py is made of."""
