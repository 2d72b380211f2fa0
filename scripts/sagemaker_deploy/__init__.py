"""What deploy_sagemaker.py is made of."""
