"""Tokens on a grid: exact clustering within windows, or merges of neighbouring groups only (`reference.py`)."""
