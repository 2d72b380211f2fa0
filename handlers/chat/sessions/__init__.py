"""Sessions: their store, queues of turns, expiry, ids and journal records. Uses `images`."""
