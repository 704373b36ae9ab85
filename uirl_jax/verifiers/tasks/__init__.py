"""What the bundled verifier offers: the hermetic desktop, and one interface to every type."""
