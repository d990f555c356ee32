"""What of mosec 0.9 the benchmark uses."""

class Worker:
    resp_mime_type: str

class Server:
    def append_worker(self, worker: type[Worker], num: int = ...) -> None: ...
    def run(self) -> None: ...
