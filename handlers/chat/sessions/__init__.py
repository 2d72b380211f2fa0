"""Sessions: the store, the journal records and the session ids."""
