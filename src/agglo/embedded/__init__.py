"""The models and images that come with agglo: nothing here needs a download."""
