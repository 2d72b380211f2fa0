"""The data plane's page for people: a conversation in the browser, by the same API that everyone uses."""
