"""Messages of the protocol.

`types` lists the messages between clients and the daemon, which are in `inference`, `control`, `status`, `metrics`,
`events` and `regions`. `worker` lists the messages between the daemon and its child processes, some of which are in
`ranks`.

Field names follow the Open Inference Protocol v2. Tensor bytes are not part of these messages. They are in the frames
after the header, one for each entry of `inputs` or `outputs`, in the same order.
"""
