"""Is this node fit for the job?  `assessment` decides; the other modules measure."""
