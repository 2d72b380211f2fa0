"""The admin plane's page for people: the fleet as it is, the last minutes, and buttons to drain an instance."""
