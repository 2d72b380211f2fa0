"""Errors of a deployment, whose messages say what to do."""

from __future__ import annotations


class DeployError(Exception):
    """Nothing can go on; the text is for a person."""


class SettingsError(DeployError):
    """A flag or the file says something that AWS, or this script, would refuse."""


class EndpointFailed(DeployError):
    """SageMaker could not create an endpoint, or rolled an update back."""
