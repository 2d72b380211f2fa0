"""Names of header fields as bytes, in lower case: those of wire/headers.py that the proxy reads, and others."""

from torchmoor.wire import headers

ACCEPT = b"accept"
CONTENT_TYPE = b"content-type"

# The ids of a request in the answers of AWS's and OpenAI's APIs, and in those of the other dialects
AWS_REQUEST_ID = b"x-amzn-requestid"
OPENAI_REQUEST_ID = b"x-request-id"
REQUEST_ID = headers.REQUEST_ID.encode()

BACKGROUND = headers.BACKGROUND.encode()
CONTINUABLE = headers.CONTINUABLE.encode()
ERROR_CODE = headers.ERROR.encode()  # of an error answer: see wire/error_codes.py
MODEL_CACHE = headers.MODEL_CACHE.encode()  # the tier in which the handler had the model when the request came
MODEL_LOAD_MS = headers.MODEL_LOAD_MS.encode()  # how long the request waited for its model
OWN_PREFIX = headers.TORCHMOOR_PREFIX.encode()

# SageMaker's runtime API
CLOSED_SESSION_ID = headers.CLOSED_SESSION_ID.encode()
CUSTOM_ATTRIBUTES = headers.CUSTOM_ATTRIBUTES.encode()
ENABLE_EXPLANATIONS = headers.ENABLE_EXPLANATIONS.encode()
FAILURE_LOCATION = headers.FAILURE_LOCATION.encode()
FILENAME = headers.FILENAME.encode()
INFERENCE_COMPONENT = headers.INFERENCE_COMPONENT.encode()
INFERENCE_ID = headers.INFERENCE_ID.encode()
INPUT_LOCATION = headers.INPUT_LOCATION.encode()
INVOCATION_ID = headers.INVOCATION_ID.encode()  # a client's repeated request has the same id
INVOCATION_TIMEOUT = headers.INVOCATION_TIMEOUT_S.encode()
NEW_SESSION_ID = headers.NEW_SESSION_ID.encode()
OUTPUT_LOCATION = headers.OUTPUT_LOCATION.encode()
OUTPUT_PATH_EXTENSION = headers.OUTPUT_PATH_EXTENSION.encode()
PREFIX_AWARE_ID = headers.PREFIX_AWARE_ID.encode()
REQUEST_TTL = headers.REQUEST_TTL_S.encode()
SAGEMAKER_ACCEPT = headers.ACCEPT.encode()
SAGEMAKER_CONTENT_TYPE = headers.CONTENT_TYPE.encode()
SESSION_ID = headers.SESSION_ID.encode()
TARGET_CONTAINER = headers.TARGET_CONTAINER.encode()
TARGET_MODEL = headers.TARGET_MODEL.encode()
TARGET_VARIANT = headers.TARGET_VARIANT.encode()

# TorchServe's
SEQUENCE_START = headers.SEQUENCE_START.encode()
STREAM_NEXT = b"ts_stream_next"
