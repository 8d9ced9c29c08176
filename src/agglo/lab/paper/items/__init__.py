"""One file per kind of item; `agglo.lab.paper.registry` lists them."""
