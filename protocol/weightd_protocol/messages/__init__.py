"""What is said over the wire, by who speaks: clients (`data`, `control`, `status`, `metrics`; all: `types`), children.

Field names are those of the Open Inference Protocol v2. Tensor bytes are not in these messages: they are the frames
that follow the header, one for each entry of `inputs` or `outputs`, in the same order.
"""
