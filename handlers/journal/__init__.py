"""Where sessions are recorded: one small interface, and what implements it."""
