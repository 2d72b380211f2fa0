"""A third-party handler that uses TorchServe's sequenceBatching, and the tests of it behind the proxy."""
