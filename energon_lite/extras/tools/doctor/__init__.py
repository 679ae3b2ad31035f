"""Examination of a machine for training: findings, and what to do about them."""
