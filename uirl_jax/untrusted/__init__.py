"""What comes from outside: HTTP and JSON within limits."""
