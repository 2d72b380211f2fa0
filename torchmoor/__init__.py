"""The front proxy of torchmoor and its command line. It imports neither torch nor TorchServe's Python code."""

__version__ = "0.1.0"
