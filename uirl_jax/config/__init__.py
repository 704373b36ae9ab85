"""Config file to frozen dataclasses: `reading` converts and checks, `schema` defines the keys."""
