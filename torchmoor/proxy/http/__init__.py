"""The data plane's HTTP/1.1: messages, connections, exchanges and event-stream frames.

Requests are read strictly and handled by callbacks, without a task or timer per request. An `Application` decides about
them (`call.py`). Of torchmoor, this package imports only `wire`, `config` and `fault_log`.
"""
