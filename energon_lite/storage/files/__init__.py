"""Files that are replaced atomically, locked, mapped or reopened, whatever their contents."""
