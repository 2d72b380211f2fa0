"""The API's reference: a table of all routes, and the OpenAPI documents generated from it."""
