from typing import Any

class NumpyCodec:
    @classmethod
    def decode_input(cls, request_input: Any) -> Any: ...
    @classmethod
    def encode_output(cls, name: str, payload: Any) -> Any: ...
