"""Tokenizing of texts into a data set, for ``energon-lite tokenize``.

files --records--> blocks --tasks--> tokens and masks --shards--> tars --run--> a prepared data set
"""
