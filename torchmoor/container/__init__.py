"""What the image runs: its roles, and what they are told by the environment and by /opt/ml/model."""
