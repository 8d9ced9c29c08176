"""Generating over a grid of methods and keep rates, and measuring: Frechet distance, error against dense."""
