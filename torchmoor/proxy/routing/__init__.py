"""Which instance takes a request: pure functions of facts and counters. No sockets, clocks or files here."""
