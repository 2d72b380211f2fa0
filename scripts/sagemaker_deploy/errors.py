"""Defines the errors of a deployment. Their messages say what to do."""

from __future__ import annotations


class DeployError(Exception):
    """Raised if a command cannot continue; the message is for the user."""


class SettingsError(DeployError):
    """Raised if an option or the file has a value that AWS or this script refuses."""


class EndpointFailed(DeployError):
    """Raised if SageMaker cannot create an endpoint, or rolls an update back."""
