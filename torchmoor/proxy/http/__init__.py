"""The data plane's HTTP/1.1, read strictly: callbacks, no task or timer a request.

Knows nothing of routing, instances or dialects: an `Application` decides, see `call.py`.
"""
