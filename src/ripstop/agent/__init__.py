"""One node's supervisor: what it decides, and how that is carried out."""
