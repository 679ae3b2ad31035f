"""Programs that use the library as anybody would: from outside."""
