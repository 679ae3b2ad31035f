"""Joined data sets, and stores of auxiliary data sets for cookers."""
