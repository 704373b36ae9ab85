"""The client side: HTTP to a verifier, in every dialect, with nothing trusted that comes back."""
