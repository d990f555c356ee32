"""What of mosec 0.9 the benchmark uses."""

class Worker:
    resp_mime_type: str

class Server:
    def append_worker(
        self, worker: type[Worker], num: int = ..., max_batch_size: int = ..., max_wait_time: int = ...
    ) -> None: ...
    def run(self) -> None: ...
