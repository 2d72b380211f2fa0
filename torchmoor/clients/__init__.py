"""Client library of an endpoint: stream readers, asynchronous results, LangChain's classes. Imports wire only."""
