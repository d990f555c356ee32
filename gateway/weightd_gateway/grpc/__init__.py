"""gRPC: the Open Inference Protocol, the health protocol and reflection, on the semantics that REST has, too."""
