"""Object stores for inputs and results: directories, S3 and HTTPS. May import config and errors."""
