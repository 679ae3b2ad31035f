"""A page to look at data: the blend and its shares, batches of any step made again from their keys, each sample as it
is stored and as the hooks make it, packs, and what is bad. Served to this machine only, or written as one file.
"""
