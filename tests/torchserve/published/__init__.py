"""Clients that use AWS's libraries as the published examples of the five systems do, from create to delete.

Each runs in the environment of the SageMaker SDK. Only AWS_ENDPOINT_URL, the store's address and names differ from AWS.
"""
