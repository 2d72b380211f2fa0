"""Workers that take requests from a queue, send them to instances and publish the results."""
