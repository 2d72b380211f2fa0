"""What a client of an endpoint uses: readers of streams, waiting for asynchronous results, LangChain's classes."""
