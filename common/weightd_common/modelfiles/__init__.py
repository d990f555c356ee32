"""Model files: which files a model consists of, what a MindIR says of its model, and protobuf as far as both need."""
