"""Running something over all samples of a data set, to store a length of each."""
