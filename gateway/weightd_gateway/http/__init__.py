"""HTTP: the REST form of the Open Inference Protocol, with the extensions that Triton's clients use."""
