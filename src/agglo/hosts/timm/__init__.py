"""Reduced models of timm."""
