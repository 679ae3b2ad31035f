"""Extras of the core: each folder can be deleted, and the rest of the package still works.

``wire``, objects as bytes that another machine may send, belongs to several of them.
"""
