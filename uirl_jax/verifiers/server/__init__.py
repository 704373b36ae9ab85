"""The bundled verifier: an HTTP server that opens sessions, acts and judges."""
