"""Texts in, a data set of tokens out: what ``energon-lite tokenize`` does.

files --records--> blocks --tasks--> tokens and masks --shards--> tars --run--> a prepared data set
"""
