"""What ends the demo early."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message is a sentence for whoever started it."""
