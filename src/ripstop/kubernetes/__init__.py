"""ElasticJobs on Kubernetes: the custom resource, the operator, and the objects of a job."""
