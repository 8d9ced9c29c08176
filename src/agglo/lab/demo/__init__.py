"""The demo, which needs no download."""
