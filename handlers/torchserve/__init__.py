"""TorchServe's interface: starts a worker's parts, passes requests and replies. May import all of handlers."""
