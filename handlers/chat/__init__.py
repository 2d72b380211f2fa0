"""The chat service: dialects, turns, sessions and pictures, and the types that they share."""
