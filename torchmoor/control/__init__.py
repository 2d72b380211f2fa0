"""SageMaker's control plane for this host: models, endpoint configurations and endpoints through AWS's own clients."""
