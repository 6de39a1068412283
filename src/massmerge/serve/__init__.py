"""A bundle as an HTTP service: API, batching, limits, metrics, and the page."""
