"""The code that runs inside a TorchServe worker.

Each archive contains all of it; it does not depend on the front proxy.
"""
