"""Object stores: ranges over HTTP and S3 without a client library per request, and preparation of data sets there."""
