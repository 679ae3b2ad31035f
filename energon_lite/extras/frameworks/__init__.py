"""Adapters of savable loaders to other trainers, in the terms of each trainer.

Each module requires the package that it is named after, and imports it only when used. Adapters translate names and
have no mechanisms of their own: order, resuming and distribution to ranks are the loader's.
"""
