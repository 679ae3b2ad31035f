"""Joined data sets."""
