"""Tools for users that no other part of the library needs."""
