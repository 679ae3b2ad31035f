"""Loading of training data: from samples to the rows of tokens of the model."""
