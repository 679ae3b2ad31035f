"""What is kept beside the data: where each sample is, and what is known about it."""
