"""ElasticJobs on Kubernetes: a custom resource, an operator that keeps its pods, and what a pod is told."""
