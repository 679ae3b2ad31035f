"""Tools for users that nothing else in the library needs."""
