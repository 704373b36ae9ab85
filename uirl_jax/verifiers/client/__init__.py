"""The client side: HTTP to verifiers in every dialect; every answer is checked."""
