"""Files that are kept next to the data: the places of the samples, and columns of measured values."""
