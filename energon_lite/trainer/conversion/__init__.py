"""Weights of other libraries made ours, and ours made theirs, tensor by tensor."""
