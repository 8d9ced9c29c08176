"""Drawings that only the laboratory needs."""
