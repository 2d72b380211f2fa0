"""What is known of each instance: its state, load, breaker and recovery."""
