"""One container or pod per session, started and deleted by the actor."""
