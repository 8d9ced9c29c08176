"""Reduced vision transformers of transformers, recognised by their structure."""
