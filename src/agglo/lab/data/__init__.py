"""Image files and stores that several tasks read."""
