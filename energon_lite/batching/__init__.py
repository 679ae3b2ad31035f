"""Strategies and plans, which decide by integers alone which samples share a batch, and collation into a batch."""
