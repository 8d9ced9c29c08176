"""What visitors see: results as HTML (`*_html`), and the tabs that ask for them."""
