"""Command line of the library, one module for each command."""
