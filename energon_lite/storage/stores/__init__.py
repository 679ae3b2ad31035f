"""Files by name, beside the samples that are read by number: stores of them, lazy values, and a cache on a local disk."""
