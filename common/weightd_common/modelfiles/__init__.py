"""Model files: the files of a model, the signature in a MindIR, and the required parts of a protobuf parser."""
