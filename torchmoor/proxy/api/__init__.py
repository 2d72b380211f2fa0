"""The dialects that clients speak, one a file; `application` tells them apart by the request's path."""
