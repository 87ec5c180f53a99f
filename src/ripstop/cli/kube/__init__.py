"""`ripstop kube`: from a command line to Kubernetes objects (`job_objects`), and the commands to a cluster."""
