"""The parts of deploy_sagemaker.py."""
