"""The image's roles, their environment variables and the model in /opt/ml/model. May import run and below."""
