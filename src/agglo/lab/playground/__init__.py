"""The page of `agglo play`: what token reduction does to an image, by sliders and clicks.

What is computed (`tokens`, `synthesis`, `detection`, `fronts`) knows nothing of a page and can be called without
Gradio; `page` lays it out, `serving` puts it on a port.
"""
