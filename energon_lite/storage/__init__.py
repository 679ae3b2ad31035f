"""Where the bytes of samples are.

Its rooms, each of which uses those before it: files, tar, index, read, samples, prepare.
"""
