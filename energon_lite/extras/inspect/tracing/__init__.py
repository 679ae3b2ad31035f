"""Traces of loaders: the observer that writes them, and the commands that read them."""
