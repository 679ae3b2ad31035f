"""Storage: reading the bytes of samples, and the indexes of their places.

Its folders, each of which uses those before it: files, tar, index, read, samples, prepare.
"""
