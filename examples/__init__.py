"""Example programs, which use only the public names of the library."""
