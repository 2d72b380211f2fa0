"""The API's reference: a table of all routes, and the OpenAPI document that is made of it."""
