"""The front proxy of torchmoor and its command line. It knows nothing of torch or of TorchServe's Python side."""

__version__ = "0.1.0"
