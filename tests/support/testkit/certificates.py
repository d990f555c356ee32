"""Test certificates, valid for 100 years: an authority, the server `localhost` and two clients named `robot`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """A certificate and its key, in PEM."""

    certificate: str
    key: str

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Write the certificate and the key to files; return their paths."""
        paths = directory / f"{name}.crt", directory / f"{name}.key"
        for path, content in zip(paths, self, strict=True):
            path.write_text(content)
        return paths


AUTHORITY = """\
-----BEGIN CERTIFICATE-----
MIIBhzCCAS2gAwIBAgIUesfMaRUOxppN1xgntRmP7TL22TUwCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNd2VpZ2h0ZCB0ZXN0czAgFw0yNjExMjYwOTA2MzlaGA8yMTI2
MTEwMjA5MDYzOVowGDEWMBQGA1UEAwwNd2VpZ2h0ZCB0ZXN0czBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABOq9CW6bylgMlud5c2aaWfV8qCpffPmj/AlXGfh5RcZP
13AiooomdPUmtPTP1v23CUnCqHMwhSs0BZw7GquUGT+jUzBRMB0GA1UdDgQWBBSp
nwKnRXwpZi+pY43Q4wygAv1rNjAfBgNVHSMEGDAWgBSpnwKnRXwpZi+pY43Q4wyg
Av1rNjAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0gAMEUCICOWMZD/cya4
M0JubuBDOPklI7OsthwgFXyRaVnp/wi1AiEA80RsOPEKUiHCFZTfUwdQ0/bNhV5G
pMMUEq2JNofBLHs=
-----END CERTIFICATE-----
"""

SERVER = Certificate(
    """\
-----BEGIN CERTIFICATE-----
MIIBjTCCATSgAwIBAgIUVqfyqnef5oi5v4a6+46VVMhzL30wCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNd2VpZ2h0ZCB0ZXN0czAgFw0yNjExMjYwOTA2MzlaGA8yMTI2
MTEwMjA5MDYzOVowFDESMBAGA1UEAwwJbG9jYWxob3N0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEWlnVHw36uTnYTe4kx69zL86ymVB4A6ONauGTs6vtlA9Vdak7
js/LclFAB0RnSzoxUN5Q29aSJj7htgcWK8N2aKNeMFwwGgYDVR0RBBMwEYIJbG9j
YWxob3N0hwR/AAABMB0GA1UdDgQWBBSSD9zKopM10J3S1tlMvt24gWazQTAfBgNV
HSMEGDAWgBSpnwKnRXwpZi+pY43Q4wygAv1rNjAKBggqhkjOPQQDAgNHADBEAiAe
iwh6GXQHFn6ZFSFD2XynDBuk6gDFjkn9uatlTWfwpgIgP/ep/MejlDW14+emby5Q
oOkzRFhUrofMWUVxUnPIkeI=
-----END CERTIFICATE-----
""",
    """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgr8Su3rA3UWigtHS8
GwNpJme/nIbzFloaPRHkfzU6lzqhRANCAARaWdUfDfq5OdhN7iTHr3MvzrKZUHgD
o41q4ZOzq+2UD1V1qTuOz8tyUUAHRGdLOjFQ3lDb1pImPuG2BxYrw3Zo
-----END PRIVATE KEY-----
""",
)

CLIENT = Certificate(
    """\
-----BEGIN CERTIFICATE-----
MIIBgzCCASmgAwIBAgIUVqfyqnef5oi5v4a6+46VVMhzL34wCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNd2VpZ2h0ZCB0ZXN0czAgFw0yNjExMjYwOTA2MzlaGA8yMTI2
MTEwMjA5MDYzOVowEDEOMAwGA1UEAwwFcm9ib3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARe2Y40mK8MyEWOcCLVNyY8pp5MPDoI88bx2CJ8+AJRZuUa0qibEUtR
GEgR4IvNL62n69URhFJ6JhUAF6puL0Qmo1cwVTATBgNVHSUEDDAKBggrBgEFBQcD
AjAdBgNVHQ4EFgQU/PDTqw867bT2ORSed6qPGCIzgVowHwYDVR0jBBgwFoAUqZ8C
p0V8KWYvqWON0OMMoAL9azYwCgYIKoZIzj0EAwIDSAAwRQIhALKNJbWU8yb3n43V
jLENnUSgnhDklxML33nLt04BFRlBAiBFEYrnq7mVKUesbLkssbX6tLVAgpzUXn6y
A1b18hCbzQ==
-----END CERTIFICATE-----
""",
    """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgv99QDymq/gyPLU4N
S5jwRkQ+aQan9KtBxsyox8RkRUuhRANCAARe2Y40mK8MyEWOcCLVNyY8pp5MPDoI
88bx2CJ8+AJRZuUa0qibEUtRGEgR4IvNL62n69URhFJ6JhUAF6puL0Qm
-----END PRIVATE KEY-----
""",
)

STRANGER = Certificate(
    """\
-----BEGIN CERTIFICATE-----
MIIBdzCCAR2gAwIBAgIUe5Sv6SvDvOVPgnLPuH1VUokkwGowCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFcm9ib3QwIBcNMjYxMTI2MDkwNjM5WhgPMjEyNjExMDIwOTA2
MzlaMBAxDjAMBgNVBAMMBXJvYm90MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
r2mihPAOaib2feJ0GUXmh6nJviikI0/5wmkXR8Pk4y84j6WgxbzOGJWD9qGb5Qp1
e7KTq6s11FM1+7dMYHMp9qNTMFEwHQYDVR0OBBYEFI9+2y05ximwqmz6fmP5gNuI
Px3sMB8GA1UdIwQYMBaAFI9+2y05ximwqmz6fmP5gNuIPx3sMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgJrBNfmr9GmIBYHz4ScDNXg4Nym2YzY63
X2MLoBDSZF4CIQC6+BWhbrtpD/GPQjKHYECMJMpru63XOqSjSvym6RigLw==
-----END CERTIFICATE-----
""",
    """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgzuGn6iumq09iTcDU
iFY4VPYUfgi5Xo1CVnnJz4VI8rChRANCAASvaaKE8A5qJvZ94nQZReaHqcm+KKQj
T/nCaRdHw+TjLziPpaDFvM4YlYP2oZvlCnV7spOrqzXUUzX7t0xgcyn2
-----END PRIVATE KEY-----
""",
)
"""A self-signed certificate with the name `robot`, which the authority has not signed."""
