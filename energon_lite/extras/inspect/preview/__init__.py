"""Preview of data in a browser, served to this machine only or written as one file.

It shows the blend and its shares, batches of any step made again from their addresses, each sample as stored and after
the hooks, packs, and bad samples.
"""
