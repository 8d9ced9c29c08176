"""The page of `agglo play`: what token reduction does to an image, by sliders and clicks.

What is computed (`tokens`, `synthesis`, `detection`) knows nothing of a page and can be called without Gradio; `tabs`
and `html`, with the templates in `page`, lay it out, `serving` puts it on a port.
"""
