"""Records sessions durably: one protocol and its stores. Runs without torch; knows no sessions or models."""
