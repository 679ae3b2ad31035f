"""From samples to the rows of tokens that a model takes."""
