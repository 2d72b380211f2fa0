"""Names of the header fields that more than one side reads or writes, in lower case (docs/runtime-api.md).

The proxy has them as bytes in proxy/http/field_names.py; proxy/api/runtime_members.py has all of the runtime API's
requests.
"""

# From the proxy to a handler
CONTINUATION = "x-torchmoor-continuation"  # see continuation.py: bytes of the body before the original one
ENDPOINT = "x-torchmoor-endpoint"
FORM_FILENAME = "x-torchmoor-form-filename"  # of an uploaded file, percent-encoded: TorchServe's form has no names
NEEDS_MODEL = "x-torchmoor-needs-model"  # the body must have OpenAI's `model`
MODEL_VERSION = "x-torchmoor-model-version"  # that the path of the open inference protocol names
MODEL_QUESTION = "x-torchmoor-model-question"  # of one of many models: see operations.MODEL_QUESTIONS
OPERATION = "x-torchmoor-operation"
PRINCIPAL = "x-torchmoor-principal"
REQUEST_ID = "x-torchmoor-request-id"
RESOURCE = "x-torchmoor-resource"  # of OpenAI's API: the method and the path below /v1/, with its query
SESSION_LIMIT = "x-torchmoor-session-limit"  # the caller may not open another session
SOURCE = "x-torchmoor-source"  # the address of a caller without a principal, where callers are limited
TGI_ROUTE = "x-torchmoor-tgi-route"  # GENERATE or GENERATE_STREAM: the body has `inputs`, and the route sets the form
TIMEOUT_MS = "x-torchmoor-timeout-ms"
# An instance gets this much more time than the client, so that the proxy is the one to report a time-out.
TIMEOUT_GRACE_S = 1.0

# In both directions
CONTINUABLE = "x-torchmoor-continuable"  # see continuation.py

# From a handler; what an answer cost: see receipt.py
BACKGROUND = "x-torchmoor-background"  # the id of a response that the proxy is to queue before it passes the answer on
ERROR = "x-torchmoor-error"
MODEL_CACHE = "x-torchmoor-model-cache"
MODEL_LOAD_MS = "x-torchmoor-model-load-ms"

# From the proxy to a client
INSTANCE = "x-torchmoor-instance"

TORCHMOOR_PREFIX = "x-torchmoor-"

# SageMaker's runtime API
SAGEMAKER_PREFIX = "x-amzn-sagemaker-"
ACCEPT = "x-amzn-sagemaker-accept"
CLOSED_SESSION_ID = "x-amzn-sagemaker-closed-session-id"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
INVOKED_ROUTING_REASON = "x-amzn-sagemaker-invoked-routing-reason"
NEW_SESSION_ID = "x-amzn-sagemaker-new-session-id"
SESSION_ID = "x-amzn-sagemaker-session-id"
TARGET_MODEL = "x-amzn-sagemaker-target-model"

# Open inference protocol: the length of the JSON before raw tensors
INFERENCE_HEADER_LENGTH = "inference-header-content-length"

# Other names of the runtime API
INVOCATION_ID = "amz-sdk-invocation-id"  # boto3 keeps it when it sends a request again
INVOKED_VARIANT = "x-amzn-invoked-production-variant"
MAX_INLINE_BYTES = 128_000  # of an asynchronous request's body; x-amzn-sagemaker-inputlocation names a longer one

# TorchServe's sequenceBatching, with the names that AWS's LLaVA sample gives its fields
SEQUENCE_ID = "X-Amzn-SageMaker-Session-Id"
SEQUENCE_START = "ts_request_sequence_start"  # TorchServe's default
SEQUENCE_END = "X-Amzn-SageMaker-Closed-Session-Id"

# A value of SESSION_ID
NEW_SESSION = "NEW_SESSION"

# Values of TGI_ROUTE
GENERATE = "generate"
GENERATE_STREAM = "generate_stream"
