"""Commands of the trainer: tokenize, convert-weights."""
