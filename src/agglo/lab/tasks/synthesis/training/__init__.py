"""Training the generator that comes with agglo."""
