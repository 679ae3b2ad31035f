"""Files by name, beside samples, which are read by number: stores of them, lazy values, and a cache on a local disk."""
