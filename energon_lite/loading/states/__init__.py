"""Saved states: as files, as one for all ranks, in words, and carried over to a changed blend."""
