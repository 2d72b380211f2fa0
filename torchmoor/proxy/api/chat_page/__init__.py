"""The chat page: a conversation in the browser, through the data plane's public API."""
