"""A handler of another maker that uses TorchServe's sequenceBatching, and the tests of it behind the proxy."""
