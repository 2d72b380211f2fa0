"""Where a checkpoint may be besides a directory: a prefix in S3, or a model of the Hugging Face hub. Its variables."""

import re

S3 = "s3://"
HUB = "hf://"
HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)  # owner/name, or a name alone

MODEL_PATH = "TORCHMOOR_HANDLER_MODEL_PATH"
CHECKPOINT_VARIABLES = (MODEL_PATH, "HF_MODEL_ID", "OPTION_MODEL_ID")  # name the chat handler's checkpoint
