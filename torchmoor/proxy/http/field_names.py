"""Names of header fields as bytes, in lower case: those of wire/headers.py that the proxy reads, and its own."""

from torchmoor.wire import headers

ACCEPT = b"accept"
CONTENT_TYPE = b"content-type"
DATE = b"date"

# Fields with secrets: never forwarded, kept or logged
CREDENTIALS = frozenset((b"authorization", b"cookie", b"proxy-authorization", b"x-amz-security-token"))

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
FAILURE_LOCATION = b"x-amzn-sagemaker-failurelocation"
INFERENCE_ID = headers.INFERENCE_ID.encode()
INVOCATION_ID = headers.INVOCATION_ID.encode()  # a client's repeated request has the same id
NEW_SESSION_ID = headers.NEW_SESSION_ID.encode()
OUTPUT_LOCATION = b"x-amzn-sagemaker-outputlocation"
SESSION_ID = headers.SESSION_ID.encode()

# TorchServe's
SEQUENCE_START = headers.SEQUENCE_START.encode()
STREAM_NEXT = b"ts_stream_next"
