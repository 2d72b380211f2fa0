"""Options that several commands have, and their defaults."""

DEFAULT_ENDPOINT = "llava"
