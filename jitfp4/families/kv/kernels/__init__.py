"""One module for each template, of the same name."""
