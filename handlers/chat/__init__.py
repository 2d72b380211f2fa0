"""The chat service: dialects, turns, sessions and images, and the types that they share."""
