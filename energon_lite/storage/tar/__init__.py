"""What samples a tar has, and where in it their parts are."""
