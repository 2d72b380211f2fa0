"""Sessions, their images and their turns: one chat request from the wire to the engine and back."""
