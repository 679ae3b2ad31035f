"""Commands of the trainer: tokenize, convert-weights, doctor, layout."""
