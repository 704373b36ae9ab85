"""What comes from outside: HTTP, JSON and text, within limits."""
