"""Who may use the data plane: credentials, the check of each request, TLS. Knows no dialect and no instance."""
