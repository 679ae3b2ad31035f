"""The error that ends the demo."""

from __future__ import annotations


class DemoError(Exception):
    """A failed part of the demo; the message is for the user."""
