"""Adapters to other people's trainers: each hands a savable loader to a trainer in the trainer's own words.

Each module needs the package that it is named after, and imports it only when it is used. None has a mechanism of its
own: order, resuming and dealing to ranks are the loader's, and an adapter translates names.
"""
