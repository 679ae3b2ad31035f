"""Conversion of weights to and from other libraries, tensor by tensor."""
