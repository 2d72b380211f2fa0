"""The dialects: how requests of each API are read, checked and answered, one dialect per module.

Imports dispatch and the layers below it, and torchmoor.async_inference for InvokeEndpointAsync.
"""
