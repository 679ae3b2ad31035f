"""Very large blends: leaves are opened when they are read, and a cache keeps their properties between starts."""
