"""What visitors see: `html` renders results with the templates, and the tabs ask for them."""
