"""What can be tried without downloading anything."""
