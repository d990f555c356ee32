"""gRPC frontend: Open Inference Protocol, health checks and reflection, with the same behaviour as the REST API."""
