"""Saved states: as files, merged for all ranks, as text, and rebased to a changed blend."""
