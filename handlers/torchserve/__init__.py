"""The side towards TorchServe: starts a worker's parts, passes requests and replies. May import all of handlers."""
