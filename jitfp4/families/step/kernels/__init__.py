"""One module for each template."""
