"""Ranges of objects over HTTP and S3 without a client library per request."""
