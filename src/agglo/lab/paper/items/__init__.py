"""One file per kind of item; `registry.py` beside this folder lists them."""
