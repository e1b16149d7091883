"""One module for each template, of the same name: tactics, spec, what is legal, geometry, parameters, bind."""
