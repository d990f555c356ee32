"""Messages of the protocol.

The module `types` lists the messages between clients and the daemon. They are declared in `inference`, `control`,
`status`, `metrics`, `events` and `regions`. The module `worker` lists the messages between the daemon and its child
processes, some of which are declared in `ranks`.

Field names follow the Open Inference Protocol v2. The messages do not contain the bytes of tensors. These bytes are in
the frames after the header: one frame for each entry of `inputs` or `outputs`, in the same order.
"""
