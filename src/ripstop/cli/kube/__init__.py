"""`ripstop kube`: from a command line to Kubernetes objects (`job`), and requests to a cluster (`cluster`)."""
