"""Training runs: configuration, the loop, one step, evaluation, generation."""
