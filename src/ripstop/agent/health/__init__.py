"""Whether this node is fit for the job: `assessment` decides; the other modules measure."""
