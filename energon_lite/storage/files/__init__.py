"""Files that are replaced whole, locked, mapped or opened again; nothing about what is in them."""
