"""One file per kind of item; `reproduce/registry.py` lists them."""
